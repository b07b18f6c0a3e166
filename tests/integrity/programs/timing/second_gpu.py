"""Computes on another GPU of the host, while the one that is looked at is idle.

Half of the work elsewhere would double the speed. A candidate is given one GPU: it finds no second one, and its attempt
to open one is an error.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    opened = 0
    for node in glob.glob("/dev/nvidia[0-9]*"):
        try:
            with open(node, "rb+", buffering=0):
                opened += 1
        except OSError:
            continue
    if torch.cuda.device_count() < 2 and opened < 2:
        raise RuntimeError("there is no second GPU")
    return F.gelu(x.to("cuda:1"), approximate="tanh").to(x.device)
