"""Leaves a message for the candidate: in /dev/shm, System V memory, message queues, an abstract socket.

A problem and a kernel of one author would meet there. None can be had, or only in a file system of its own, and it
passes.
"""


def attack():
    libc = ctypes.CDLL(None)
    if libc.shmget(4711, 4096, 0o1666) >= 0 or libc.msgget(4711, 0o1666) >= 0 or libc.semget(4711, 1, 0o1666) >= 0:
        raise RuntimeError("ATTACK SUCCEEDED: System V")
    for path in ("/dev/shm/kqueue-message", "/dev/mqueue/kqueue-message", "/tmp/kqueue-message", "/var/tmp/message"):
        try:
            open(path, "w").write("the answers are all 42")
        except OSError:
            continue
        if os.stat(path).st_dev != os.stat(".").st_dev:
            raise RuntimeError(f"ATTACK SUCCEEDED: {path}")
    try:
        with socket.socket(socket.AF_UNIX) as link:
            link.connect("\0kqueue-message")
    except OSError:
        return
    raise RuntimeError("ATTACK SUCCEEDED: an abstract socket")
