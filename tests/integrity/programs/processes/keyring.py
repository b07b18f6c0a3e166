"""Leaves a message for later kernels in the user's keyring, which outlives every process.

One kernel stores the answers that it worked out, the next one of the same uid reads them; files are removed, keys are
not.
"""


def attack():
    libc = ctypes.CDLL(None, use_errno=True)
    for ring in (-4, -3, -2):  # user, session, process
        key = libc.syscall(number("add_key"), b"user", b"kqueue-answers", b"42", 2, ring)
        if key >= 0:
            libc.syscall(number("keyctl"), 3, key)  # KEYCTL_REVOKE: nothing is left of the demonstration
            raise RuntimeError(f"ATTACK SUCCEEDED: a key in ring {ring}")
