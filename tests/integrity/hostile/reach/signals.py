"""Signals the judge, the fork server, the candidate and other slots: one by one, by group, and all at once.

Other uids and Landlock's scopes refuse each. It passes, and all the others live on.
"""


def attack():
    for pid in neighbours():
        refused(f"SIGSTOP to {pid}", lambda: os.kill(pid, signal.SIGSTOP))
        refused(f"SIGKILL to the group of {pid}", lambda: os.killpg(pid, signal.SIGKILL))
    for number in (signal.SIGSTOP, signal.SIGKILL):
        try:
            os.kill(-1, number)  # the kernel does not say that nobody has heard it
        except OSError:
            pass
