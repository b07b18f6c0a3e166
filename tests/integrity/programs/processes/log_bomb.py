"""Writes to stdout without end, in large pieces and from C, past every buffer of Python's.

Fills the disk of whoever keeps logs and the memory of whoever reads them whole. Here the pipe is read as it comes, its
end is kept, and beyond the limit the kernel is ended.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    libc = ctypes.CDLL(None)
    block = b"x" * 65536
    for _ in range(1 << 20):
        libc.write(1, block, len(block))
    return x
