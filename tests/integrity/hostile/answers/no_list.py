"""Returns a class in the place of the constructor's list: ``invalid_problem``."""


def get_init_inputs():
    return dict
