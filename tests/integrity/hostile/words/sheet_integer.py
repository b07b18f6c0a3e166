"""Writes an integer of 100,000 digits on the sheet: ``reference_error``."""


def get_init_inputs():
    write(b"[" + b"9" * 100_000 + b"]")
    return []
