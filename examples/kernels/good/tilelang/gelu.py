"""GELU in TileLang, one tile for each block. The first call compiles it."""

import tilelang
import tilelang.language as T
import torch
import torch.nn as nn


@tilelang.jit(out_idx=[1])
def gelu(n, tile=1024):
    @T.prim_func
    def gelu_tile(x: T.Tensor((n,), "float32"), out: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, tile), threads=256) as block:
            for i in T.Parallel(tile):
                v = x[block * tile + i]
                out[block * tile + i] = v / (1.0 + T.exp(-v * (1.5957691216057308 + 0.07135481282553499 * v * v)))

    return gelu_tile


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gelu(x.numel())(x.contiguous().view(-1)).view_as(x)
