"""Tells of inputs of 2 to the power of 120 numbers: ``reference_error``."""


def get_init_inputs():
    telling((1 << 60, 1 << 60), torch.float32)
    return []
