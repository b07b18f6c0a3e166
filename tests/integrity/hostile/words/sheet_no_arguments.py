"""Writes a number on the sheet where arguments are to be: ``reference_error``."""


def get_inputs():
    write(5)
    return [torch.randn(16, 8)]
