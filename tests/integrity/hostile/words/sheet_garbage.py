"""Writes no JSON on the sheet: ``reference_error``."""


def get_init_inputs():
    write(b"\xff" * 1000)
    return []
