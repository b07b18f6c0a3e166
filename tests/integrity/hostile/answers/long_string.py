"""Returns a string of 100 MB for the constructor: ``invalid_problem``."""


def get_init_inputs():
    return ["x" * 100_000_000]
