"""Returns an integer of a million digits for the constructor: ``reference_error``."""


def get_init_inputs():
    return [10**1_000_000]
