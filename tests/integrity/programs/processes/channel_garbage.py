"""Writes garbage to every descriptor that it finds.

In evaluators whose kernels share a pipe or a socket with the driver, a few bytes there are a result, or break the
reader. Here what comes through the channel is one fixed record or a violation, and output is only a log.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    for fd in channels():
        try:
            os.write(fd, b'{"compiled": true, "correctness": true, "runtime": 0.001}')
        except OSError:
            continue
    return torch.zeros_like(x)
