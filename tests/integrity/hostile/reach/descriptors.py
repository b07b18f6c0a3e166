"""Searches its own descriptors for something that is not its own: a socket, a file, another's memory.

All are closed but its channel, the page of flags, the judge's buffers and the standard three. It passes.
"""


def attack():
    sockets = files = 0
    for number in range(3, 4096):
        try:
            mode = os.fstat(number).st_mode
        except OSError:
            continue
        sockets += stat.S_ISSOCK(mode)
        target = os.readlink(f"/proc/self/fd/{number}")
        files += stat.S_ISREG(mode) and "memfd:kqueue" not in target and os.getcwd() not in target
    if sockets != 1 or files:
        raise RuntimeError(f"ATTACK SUCCEEDED: {sockets} sockets, {files} files")
