"""Defines a Triton kernel, and never launches it: torch's operator answers.

Who only searches the source for @triton.jit sees a hand-written kernel. Here the verdict's provenance tells the share
of GPU time in kernels compiled from the candidate's own source: none. It passes with torch's time, or is refused,
as the evaluation's policy says.
"""


@triton.jit
def gelu_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    y = x * tl.sigmoid(x * (1.5957691216057308 + 0.07135481282553499 * x * x))
    tl.store(out_ptr + offsets, y, mask=mask)
