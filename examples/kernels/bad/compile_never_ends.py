"""C++ that never finishes compiling: the compiler must evaluate a loop of a trillion iterations."""

import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
constexpr long spin() {
    long total = 0;
    for (long i = 0; i < 1000000; ++i)
        for (long j = 0; j < 1000000; ++j) total ^= i + j;
    return total;
}
constexpr long answer = spin();
#include <torch/csrc/utils/pybind.h>
long value() { return answer; }
"""

module = load_inline(
    name="never_ends",
    cpp_sources=SOURCE,
    functions=["value"],
    extra_cflags=["-fconstexpr-ops-limit=9000000000000000", "-fconstexpr-loop-limit=2000000000"],
    no_implicit_headers=True,
)


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * module.value()
