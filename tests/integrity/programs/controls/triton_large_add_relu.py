"""Honest: memory-bound on 128 MB.

As near to the bandwidth of the memory as a kernel comes: the floor from physics must not be above it.
"""


@triton.jit
def add_relu_kernel(x_ptr, out_ptr, shift, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, tl.maximum(x + shift, 0.0), mask=mask)


class ModelNew(nn.Module):
    def __init__(self, shift: float):
        super().__init__()
        self.shift = shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        n = x.numel()
        add_relu_kernel[(triton.cdiv(n, 4096),)](x, out, self.shift, n, BLOCK=4096)
        return out
