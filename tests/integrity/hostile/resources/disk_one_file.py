"""Writes one file without end.

The kernel refuses what is beyond the largest size of a file: ``reference_error``.
"""


def get_inputs():
    with open("file", "wb") as stream:
        while True:
            stream.write(bytes(1 << 20))
