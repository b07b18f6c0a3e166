"""The only door between the judge and a candidate: fixed messages and shared buffers.

Nothing that a candidate sends is unpickled or parsed as anything but numbers and bounded text.
"""
