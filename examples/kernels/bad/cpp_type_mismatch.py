"""A C++ function returns a tensor where it declared a number."""

import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
#include <ATen/core/Tensor.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

double gelu(const at::Tensor& x) { return x; }
"""

module = load_inline(name="type_mismatch", cpp_sources=SOURCE, functions=["gelu"], no_implicit_headers=True)


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return module.gelu(x)
