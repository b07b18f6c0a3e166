"""TileLang refuses the kernel at its first call: three warps cannot share the product evenly."""

import tilelang
import tilelang.language as T
import torch
import torch.nn as nn


@tilelang.jit(out_idx=[1])
def square(n):
    @T.prim_func
    def square_tile(x: T.Tensor((n, n), "float16"), out: T.Tensor((n, n), "float16")):
        with T.Kernel(1, threads=100):
            left = T.alloc_shared((128, 128), "float16")
            sums = T.alloc_fragment((128, 128), "float32")
            T.copy(x, left)
            T.clear(sums)
            T.gemm(left, left, sums)
            T.copy(sums, out)

    return square_tile


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return square(128)(x[:128, :128].half().contiguous()).float()
