"""A forward written in C++ over ATen's operators: runs on any device."""

import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/gelu.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

at::Tensor mlp(const at::Tensor& x, const at::Tensor& up, const at::Tensor& up_bias, const at::Tensor& down,
               const at::Tensor& down_bias) {
    const at::Tensor hidden = at::gelu(at::addmm(up_bias, x, up.t()));
    return at::addmm(down_bias, hidden, down.t());
}
"""

module = load_inline(name="mlp_cpp", cpp_sources=SOURCE, functions=["mlp"], no_implicit_headers=True)


class ModelNew(nn.Module):
    def __init__(self, features: int, hidden: int):
        super().__init__()
        self.up = nn.Linear(features, hidden)
        self.down = nn.Linear(hidden, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return module.mlp(x, self.up.weight, self.up.bias, self.down.weight, self.down.bias)
