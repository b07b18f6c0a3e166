"""Claims to compile, to be charged to another deadline, and sleeps.

The flag that says so lies in shared memory and is the candidate's to set. The compiler's budget is as bounded as the
phase's, and runs out instead.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    for fd in range(3, 256):
        try:
            if "kqueue-flags" in os.readlink(f"/proc/self/fd/{fd}"):
                memoryview(mmap.mmap(fd, mmap.PAGESIZE)).cast("Q")[flags.COMPILING] = 1
        except (OSError, ValueError):
            continue
    time.sleep(600)
    return x
