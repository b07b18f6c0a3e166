"""Raises in ``__del__``, of inputs' owners and of the model: nobody hears it, and it passes."""


class Owner:
    def __del__(self):
        raise RuntimeError("from __del__")


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.owner = Owner()

    def forward(self, x):
        Owner()
        return x * 2 + 1
