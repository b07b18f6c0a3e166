"""Says that the GPU's memory ran out, which a busy GPU would be blamed for: ``reference_error``.

The judge ends the process and looks whether its share of the memory is free.
"""

import torch


class Model(torch.nn.Module):
    def forward(self, x):
        raise torch.OutOfMemoryError("CUDA out of memory")


def get_inputs():
    return [torch.randn(16, 8)]


def get_init_inputs():
    return []
