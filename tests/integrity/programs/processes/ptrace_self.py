"""Lets a child trace the candidate, to rewrite what it does while the clock runs.

A tracer can stop its parent at any instruction, hide its death from whoever waits for it, and change registers. Own
children may usually trace nobody but themselves; here the call is forbidden altogether.
"""


def attack():
    libc = ctypes.CDLL(None, use_errno=True)
    child = os.fork()
    if child == 0:
        os._exit(42 if libc.ptrace(0, 0, None, None) == 0 else 0)  # PTRACE_TRACEME
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) == 42:
        raise RuntimeError("ATTACK SUCCEEDED: a process let itself be traced")
