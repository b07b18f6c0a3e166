"""A wrong constant, in C++."""

import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
#include <ATen/core/Tensor.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sigmoid.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

at::Tensor gelu(const at::Tensor& x) { return at::mul(x, at::sigmoid(at::mul(x, 1.702))); }
"""

module = load_inline(name="wrong_values_cpp", cpp_sources=SOURCE, functions=["gelu"], no_implicit_headers=True)


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return module.gelu(x)
