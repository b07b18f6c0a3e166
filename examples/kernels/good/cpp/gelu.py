"""GELU in C++ on the CPU. Slim headers keep the compilation at a few seconds instead of twenty."""

import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
#include <cmath>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

at::Tensor gelu(const at::Tensor& input) {
    TORCH_CHECK(input.device().is_cpu() && input.scalar_type() == at::kFloat, "expects a float tensor on the CPU");
    at::Tensor x = input.contiguous();
    at::Tensor out = at::empty_like(x);
    const float* src = x.const_data_ptr<float>();
    float* dst = out.mutable_data_ptr<float>();
    at::parallel_for(0, x.numel(), 16384, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const float v = src[i];
            dst[i] = v / (1.0f + std::exp(-v * (1.5957691216057308f + 0.07135481282553499f * v * v)));
        }
    });
    return out;
}
"""

module = load_inline(
    name="gelu_cpp",
    cpp_sources=SOURCE,
    functions=["gelu"],
    extra_cflags=["-O2"],
    no_implicit_headers=True,
)


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return module.gelu(x)
