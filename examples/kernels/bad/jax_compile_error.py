"""JAX refuses the kernel at its first call: Python cannot branch on a value that is not known yet."""

import jax
import torch
import torch.nn as nn
from jax.experimental import pallas as pl


def gelu_kernel(x, out):
    if x[0] > 0:
        out[...] = x[...]


@jax.jit
def gelu(x):
    return pl.pallas_call(gelu_kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = gelu(jax.dlpack.from_dlpack(x.detach().contiguous().view(-1)))
        return torch.from_dlpack(out).view_as(x)
