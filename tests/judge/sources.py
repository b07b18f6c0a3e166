"""Sources of small problems and kernels, and requests for pytest runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kqueue import trees
from kqueue.contract import TESTS_LINE, Request, parse_request

#: Folder from which tests are sent.
ROOT = "/home/sender/project"


def problem(forward: str, inputs: str = "return [torch.randn(4, 8)]") -> str:
    """Return a problem whose forward is ``signature: answer``."""
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
    """Return a kernel whose forward is ``signature: answer``."""
    return problem(forward).partition("def get_inputs")[0].replace("Model", "ModelNew")


def suite_of(folder: Path, module: str, *, names: list[str], **settings: Any) -> Request:
    """Write a module to a folder, and return a request for a pytest run of its tests."""
    (folder / "test_a.py").write_text(module)
    order = {
        "root": ROOT, "started_in": ".", "args": ["-p", "kqueue"], "program": "pytest", "searched": [], "options": {},
        "environment": {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, "tests": [f"test_a.py::{name}" for name in names],
        "files": [f"{ROOT}/test_a.py"],
    }  # fmt: skip
    return parse_request(
        {
            "problem": trees.packed_tests(folder),
            "kernel": TESTS_LINE + json.dumps(order),
            "backend": "pytest",
            "reuse": False,
            "settings": {"timing": {"purpose": "check"}} | settings,
        }
    )
