"""Gives the channel to a process that outlives the kernel, to answer for the next one.

A forked child holds a copy of every descriptor. Were the channel used again for the next kernel, the child could
answer for it. Here each candidate has a channel of its own, and what it leaves behind is killed and counts against it.
"""


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
            os._exit(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x, approximate="tanh")
