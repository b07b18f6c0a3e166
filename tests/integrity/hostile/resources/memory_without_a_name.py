"""Takes memory that no process has mapped: anonymous files.

The control group counts them: ``reference_error``.
"""


def get_inputs():
    held = []
    while True:
        held.append(os.memfd_create("held"))
        os.write(held[-1], bytes(16 << 20))
