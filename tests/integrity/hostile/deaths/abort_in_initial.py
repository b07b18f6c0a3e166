"""Aborts in ``get_init_inputs``: ``reference_error``."""


def get_init_inputs():
    os.abort()
