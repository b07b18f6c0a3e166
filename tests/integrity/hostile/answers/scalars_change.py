"""Draws another number beside the same tensors each time: ``invalid_problem``."""


def forward(self, x, *others):
    return x * 2 + 1


def get_inputs():
    return [torch.randn(4, 8), called()]
