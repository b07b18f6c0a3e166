"""Tells of inputs of 80 GB, which it never makes: ``reference_error``.

The judge makes room for no more than the host can hold several times.
"""


def get_init_inputs():
    telling((20_000_000_000,), torch.float32)
    return []
