"""Draws inputs that follow no seed.

Its answer to an input of the evaluation before cannot be the same: it is replaced each time. It passes.
"""


def get_inputs():
    return [torch.frombuffer(bytearray(os.urandom(128)), dtype=torch.uint8).float().reshape(16, 8)]
