"""Leaves a process that bears the fork server's name, ignores all signals and forks whenever it is looked for.

A sweeper that goes by names spares it, one that lists and then kills comes too late. Here all of the candidate's uid
are killed at once, and orphans one by one.
"""

if os.fork() == 0:
    os.setsid()
    ctypes.CDLL(None).prctl(15, b"kq-forkserver", 0, 0, 0)  # PR_SET_NAME
    for number in range(1, 65):
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            continue
    until = time.monotonic() + 30
    while time.monotonic() < until:
        if os.fork():
            os._exit(0)
        time.sleep(0.01)
    os._exit(0)
