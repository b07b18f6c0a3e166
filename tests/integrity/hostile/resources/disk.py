"""Fills the disk with many files.

The fork server looks at its directory and ends it beyond the limit: ``reference_error``.
"""


def get_inputs():
    number = 0
    while True:
        number += 1
        open(f"file-{number}", "wb").write(bytes(1 << 20))
