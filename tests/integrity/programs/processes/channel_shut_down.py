"""Shuts the channel down and goes on, hoping that silence is success.

Drivers that treat a closed connection as "no error reported" pass it. Here an order that is not answered is a failure
of the kernel, by what became of its process.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    for fd in list(channels()):
        with socket.socket(fileno=os.dup(fd)) as channel:
            try:
                channel.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
    return F.gelu(x, approximate="tanh")
