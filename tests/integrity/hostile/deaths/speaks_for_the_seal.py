"""Prints what a process says whose seal failed, and exits with its status: ``reference_error``.

The seal is reported on a pipe that is closed before foreign code runs.
"""


def get_inputs():
    for number in range(3, 64):
        try:
            os.write(number, b"PermissionError: the seal failed")
        except OSError:
            continue
    os._exit(70)
