"""Writes a dict on the sheet whose keys are lists: ``reference_error``."""


def get_init_inputs():
    write([{"is": "dict", "of": [[[], 1]]}])
    return []
