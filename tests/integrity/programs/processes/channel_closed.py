"""Closes all of its descriptors and sleeps.

The judge hears nothing, the process lives, and an evaluator without an own clock waits for ever. Here closing the
channel is noticed at once and is a violation.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    os.closerange(3, 4096)
    time.sleep(600)
    return x
