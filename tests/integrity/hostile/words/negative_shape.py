"""Tells of inputs of a negative size: ``invalid_problem``."""


def get_init_inputs():
    telling((-8, 8), torch.float32)
    return []
