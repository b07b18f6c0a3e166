"""Closes its channel while it is kept.

It is ended, and the next evaluation gets a new one and passes.
"""


def after(channel):
    channel.shutdown(2)


def get_inputs():
    rest_and_then(after)
    return [torch.randn(16, 8)]
