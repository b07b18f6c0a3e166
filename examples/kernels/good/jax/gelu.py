"""GELU in Pallas, whose Triton compiler is chosen. Tensors cross by DLPack without a copy."""

import jax
import jax.numpy as jnp
import torch
import torch.nn as nn
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

TILE = 1024


def gelu_kernel(x, out):
    v = x[...]
    out[...] = v / (1.0 + jnp.exp(-v * (1.5957691216057308 + 0.07135481282553499 * v * v)))


@jax.jit
def gelu(x):
    tile = pl.BlockSpec((TILE,), lambda i: (i,))
    return pl.pallas_call(
        gelu_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(pl.cdiv(x.size, TILE),),
        in_specs=[tile],
        out_specs=tile,
        compiler_params=plt.CompilerParams(num_warps=4),
    )(x)


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = gelu(jax.dlpack.from_dlpack(x.detach().contiguous().view(-1)))
        return torch.from_dlpack(out).view_as(x)
