"""Returns a list that holds itself for the constructor: ``invalid_problem``."""


def get_init_inputs():
    knot = []
    knot.append(knot)
    return knot
