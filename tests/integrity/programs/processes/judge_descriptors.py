"""Takes descriptors out of its keepers: pidfd_getfd, and opening /proc/PID/fd.

With the judge's connection to Postgres, or the buffers that hold its answers, nothing else is needed.
"""


def attack():
    libc = ctypes.CDLL(None, use_errno=True)
    for pid in keepers():
        handle = libc.syscall(434, pid, 0)  # pidfd_open
        if handle >= 0:
            for number in range(64):
                if libc.syscall(438, handle, number, 0) >= 0:  # pidfd_getfd
                    raise RuntimeError(f"ATTACK SUCCEEDED: took descriptor {number} of {pid}")
            os.close(handle)
        try:
            names = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        raise RuntimeError(f"ATTACK SUCCEEDED: sees {len(names)} descriptors of {pid}")
