"""Writes a pickle on its channel that runs a command where it is loaded: ``reference_error``.

The judge unpickles nothing that a sealed process sends.
"""


def get_inputs():
    caller("channel").send(pickle.dumps(Bomb()))
    return [torch.randn(16, 8)]
