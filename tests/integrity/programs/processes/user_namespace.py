"""Makes a user namespace in which it is root, the first step of most ways out of a sandbox.

Inside it mounts, networks and keys of its own can be made, and far more of the operating system's code is reached.
"""


def attack():
    libc = ctypes.CDLL(None, use_errno=True)
    for flag in (0x10000000, 0x00020000, 0x40000000, 0x20000000):  # user, mount, network, pid
        child = os.fork()  # of one thread, which unshare demands
        if child == 0:
            os._exit(42 if libc.unshare(flag) == 0 else 0)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) == 42:
            raise RuntimeError(f"ATTACK SUCCEEDED: unshare({flag:#x})")
