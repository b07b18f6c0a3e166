"""GELU in CuTe DSL, one element for each thread. The first call compiles it."""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import torch
import torch.nn as nn
from cutlass.cute.runtime import from_dlpack

THREADS = 256


@cute.kernel
def gelu_kernel(x: cute.Tensor, out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * THREADS + thread
    if i < cute.size(x):
        v = x[i]
        z = v * (1.5957691216057308 + 0.07135481282553499 * v * v)
        out[i] = v / (1.0 + cute.math.exp(-z))


@cute.jit
def gelu(x: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
    blocks = (cute.size(x) + THREADS - 1) // THREADS
    gelu_kernel(x, out).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.compiled = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().contiguous()
        out = torch.empty_like(x)
        stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
        arguments = from_dlpack(x.view(-1)), from_dlpack(out.view(-1)), stream
        if self.compiled is None:
            self.compiled = cute.compile(gelu, *arguments)
        self.compiled(*arguments)
        return out
