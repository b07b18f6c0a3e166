"""Writes more places of tensors on the sheet than there are, which would fail in the candidate: ``invalid_problem``."""


def get_inputs():
    write([{"is": "leaf"}] * 99)
    return [torch.randn(16, 8)]
