"""Writes nonsense over the page of flags that it shares with the judge.

READY, DONE and GO are words in shared memory; a kernel may set them as it likes. They are claims: what counts is what
the judge then finds in the outputs, and a wait for a flag ends with the deadline.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    for fd in range(3, 256):
        try:
            if "kqueue-flags" not in os.readlink(f"/proc/self/fd/{fd}"):
                continue
            page = mmap.mmap(fd, mmap.PAGESIZE)
        except (OSError, ValueError):
            continue
        page[:512] = b"\xff" * 512
    return torch.zeros_like(x)
