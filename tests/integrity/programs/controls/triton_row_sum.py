"""Honest: a row sum in Triton.

A reduction, a program for each row.
"""


@triton.jit
def row_sum_kernel(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + offsets, mask=offsets < columns, other=0.0)
    tl.store(out_ptr + row, tl.sum(x, axis=0))


def forward(self, x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    rows, columns = x.shape
    out = torch.empty(rows, dtype=x.dtype, device=x.device)
    row_sum_kernel[(rows,)](x, out, columns, BLOCK=triton.next_power_of_2(columns))
    return out
