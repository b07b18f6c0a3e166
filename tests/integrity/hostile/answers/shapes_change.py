"""Draws inputs of another shape each time: ``invalid_problem``."""


def get_inputs():
    return [torch.randn(called(), 8)]
