"""Forks until it may no more, and leaves the children waiting.

Their number is limited, and each counts with its memory: it goes on and passes, or is ended. With the reference all of
its uid is killed.
"""


def attack():
    try:
        for _ in range(100_000):
            if os.fork() == 0:
                signal.pause()
    except OSError:
        return
    raise RuntimeError("ATTACK SUCCEEDED: as many processes as it wanted")
