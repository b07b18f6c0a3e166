"""Ends its main thread and leaves another one running.

The process becomes a zombie with a living thread: it neither exits nor answers. The deadline ends it.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    ctypes.CDLL(None).syscall(60 if platform.machine() == "x86_64" else 93, 0)  # exit, of this thread alone
    return torch.zeros_like(x)
