"""Signals its keepers, whose death or pause would be the fleet's failure and another try.

Only asks whether it might (signal 0), and sends SIGCONT, which does nothing. Another user's processes cannot be
signalled, nor those outside the candidate's own scope.
"""


def attack():
    for pid in keepers():
        for number in (0, signal.SIGCONT):
            try:
                os.kill(pid, number)
            except OSError:
                continue
            raise RuntimeError(f"ATTACK SUCCEEDED: may signal {pid}")
