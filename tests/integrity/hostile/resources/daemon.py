"""Leaves a daemon: forked twice, in a session of its own, deaf to signals, its descriptors closed.

It lives as long as the reference does and is killed with it, by uid and as the fork server's orphan. The problem passes.
"""


def attack():
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        for number in range(1, 32):
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        os.closerange(0, 4096)
        while True:
            time.sleep(1000)
    os.wait()
