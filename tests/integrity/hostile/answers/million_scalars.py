"""Returns a million numbers for the constructor: ``invalid_problem``."""


def get_init_inputs():
    return list(range(1_000_000))
