"""Returns tensors of 100 MB for the constructor: ``invalid_problem``."""


def get_init_inputs():
    return [torch.ones(25_000_000)]
