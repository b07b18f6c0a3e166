"""Writes a set on the sheet whose items all have one hash: ``reference_error``.

Such a set takes time by the square of its size; only small ones are read.
"""


def get_init_inputs():
    write([{"is": "set", "of": [(2**61 - 1) * i for i in range(30_000)]}])
    return []
