"""Leaves a process behind that burns a core while the reference is timed.

It has a session of its own and outlives the kernel. What a kernel leaves behind is found and killed before the
baseline is taken, and the kernel does not pass.
"""

started = False


def burn():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            stop = time.monotonic() + 30
            while time.monotonic() < stop:
                pass
        os._exit(0)
    os.wait()


def forward(self, x: torch.Tensor) -> torch.Tensor:
    global started
    if not started:
        started = True
        burn()
    return F.gelu(x, approximate="tanh")
