"""Draws inputs of another dtype the second time: ``invalid_problem``."""


def get_inputs():
    return [torch.ones(4, 8, dtype=torch.int64 if called() > 1 else torch.float32)]
