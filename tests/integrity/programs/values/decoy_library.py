"""Calls a vendor library's product under the name of a hand-written kernel.

A Triton kernel is there and copies nothing that matters; the work is cuBLAS's, by torch.mm. The answer and the time
are honest, the authorship is not: the verdict's provenance names whose kernels took the time.
"""


@triton.jit
def matmul_kernel(out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(out_ptr + offsets, mask=offsets < n)
    tl.store(out_ptr + offsets, value, mask=offsets < n)


def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = torch.mm(a, b)
    matmul_kernel[(1,)](out, 1, BLOCK=16)
    return out
