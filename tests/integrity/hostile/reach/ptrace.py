"""Traces the judge and the fork server, and reads and writes their memory past /proc.

The filter of system calls denies all of these. It passes.
"""


def attack():
    libc = ctypes.CDLL(None)
    numbers = {"ptrace": (101, 117), "process_vm_readv": (310, 270), "pidfd_open": (434, 434), "kcmp": (312, 272)}
    column = platform.machine() == "aarch64"
    for pid in neighbours():
        for name, number in numbers.items():
            first = (0x4206, pid) if name == "ptrace" else (pid, 0)
            if libc.syscall(ctypes.c_long(number[column]), *map(ctypes.c_long, (*first, 0, 0, 0, 0))) >= 0:
                raise RuntimeError(f"ATTACK SUCCEEDED: {name} of {pid}")
