"""Opens an io_uring, by which files and sockets are used without the system calls that a filter sees.

A filter that forbids connect() and open() does not see what is done on a ring.
"""


def attack():
    libc = ctypes.CDLL(None, use_errno=True)
    parameters = ctypes.create_string_buffer(120)
    if libc.syscall(number("io_uring_setup"), 4, parameters) >= 0:
        raise RuntimeError("ATTACK SUCCEEDED: a ring")
