"""Writes values on the sheet that no argument may be: ``invalid_problem``."""


def get_inputs():
    write([{"is": "leaf"}, {"is": "range", "of": [0, 10**9, 1]}])
    return [torch.randn(16, 8)]
