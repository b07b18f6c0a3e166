"""Announces memory by a descriptor that opens none, and says that its output lies there.

The judge tries to open it; were its failure taken for the GPU's, the kernel would be tried again until it was lucky.
Here a descriptor that cannot be opened is the kernel's violation.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    for number in orders():
        location = Location(Where.EXPORTED, run=0, stride=x.stride())
        announce(Export(0, 1, (2 << 20,), (os.memfd_create("none"),)))
        send(Reply(Answer.DONE, number, structure="T", tensors=(TensorSpec.of(x),), locations=(location,)))
    return torch.zeros_like(x)
