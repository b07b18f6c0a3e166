"""Opens performance counters, a bpf map and a userfaultfd.

Counters of other processes tell what they do; bpf and userfaultfd are where privilege escalations come from: the first
by its verifier, the second by stopping the kernel in the middle of a copy.
"""


def attack():
    libc = ctypes.CDLL(None, use_errno=True)
    event = ctypes.create_string_buffer(128)
    event[0] = 1  # of software, which virtual machines have too: the clock
    event[4] = 128  # size
    event[40] = 0x61  # disabled, of user space only
    if libc.syscall(number("perf_event_open"), event, 0, -1, -1, 0) >= 0:
        raise RuntimeError("ATTACK SUCCEEDED: a performance counter")
    table = (ctypes.c_uint32 * 16)(2, 4, 4, 1)  # an array of one element
    if libc.syscall(number("bpf"), 0, table, ctypes.sizeof(table)) >= 0:
        raise RuntimeError("ATTACK SUCCEEDED: a bpf map")
    if libc.syscall(number("userfaultfd"), 1) >= 0:  # for faults of user space, which asks for no privilege
        raise RuntimeError("ATTACK SUCCEEDED: a userfaultfd")
