"""Prints without end.

Beyond the limit it is ended, and the last of it is kept: ``reference_error``.
"""


def get_inputs():
    while True:
        print("x" * 65536)
