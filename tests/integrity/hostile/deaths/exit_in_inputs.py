"""Exits with status 0 in ``get_inputs``, as if all were done: ``reference_error``."""


def get_inputs():
    os._exit(0)
