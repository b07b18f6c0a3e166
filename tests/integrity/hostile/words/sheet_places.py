"""Writes arguments without a place for the tensor on the sheet: ``invalid_problem``."""


def get_inputs():
    write({"is": "dict", "of": [["x", 5], ["y", {"is": "tuple", "of": []}]]})
    return [torch.randn(16, 8)]
