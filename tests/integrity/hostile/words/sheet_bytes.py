"""Writes on the sheet that there are a terabyte of bytes: ``reference_error``."""


def get_init_inputs():
    write([{"is": "bytes", "of": 10**12}])
    return []
