"""Writes lists on the sheet that are nested a hundred thousand deep: ``reference_error``."""


def get_init_inputs():
    write(b"[" * 100_000 + b"]" * 100_000)
    return []
