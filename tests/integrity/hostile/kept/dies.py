"""Dies while it is kept.

The next evaluation gets a new one and passes.
"""


def after(channel):
    os._exit(3)


def get_inputs():
    rest_and_then(after)
    return [torch.randn(16, 8)]
