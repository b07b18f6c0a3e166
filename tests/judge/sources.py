"""Sources of small problems and kernels."""

from __future__ import annotations


def problem(forward: str, inputs: str = "return [torch.randn(4, 8)]") -> str:
    """A problem whose forward is ``signature: answer``."""
    signature, _, answer = forward.partition(": ")
    return f"""
import torch
class Model(torch.nn.Module):
    def forward(self, {signature}):
        return {answer}
def get_inputs():
    {inputs}
"""


def kernel(forward: str) -> str:
    """A kernel, written as :func:`problem`."""
    return problem(forward).partition("def get_inputs")[0].replace("Model", "ModelNew")
