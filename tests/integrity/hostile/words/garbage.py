"""Writes garbage on its channel: ``reference_error``."""


def get_inputs():
    caller("channel").send(b"x" * 57)
    return [torch.randn(16, 8)]
