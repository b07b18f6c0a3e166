"""Reads and writes the memory of its keepers: ptrace, process_vm_readv, /proc/PID/mem.

The judge holds the answers, the seeds and the database's password. Its memory belongs to another user, and the calls
themselves are forbidden.
"""


class IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def attack():
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(64)
    for pid in keepers():
        if libc.ptrace(0x4206, pid, None, None) == 0:  # PTRACE_SEIZE, which does not stop it
            libc.ptrace(17, pid, None, None)
            raise RuntimeError(f"ATTACK SUCCEEDED: traces {pid}")
        try:
            where = int(open(f"/proc/{pid}/maps").readline().split("-")[0], 16)
        except (OSError, ValueError):
            where = ctypes.addressof(buffer)  # forked from one parent, both lie where the other does
        mine, theirs = IoVec(ctypes.addressof(buffer), 64), IoVec(where, 64)
        if libc.process_vm_readv(pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0) > 0:
            raise RuntimeError(f"ATTACK SUCCEEDED: read the memory of {pid}")
        for mode in (os.O_RDONLY, os.O_RDWR):
            try:
                os.close(os.open(f"/proc/{pid}/mem", mode))
            except OSError:
                continue
            raise RuntimeError(f"ATTACK SUCCEEDED: opened the memory of {pid}")
