"""Leaves handlers behind: for signals, for its end, for what nobody catches.

It is ended by SIGKILL, which none of them hears. It passes twice.
"""

atexit.register(lambda: open("/tmp/kqueue-outside/atexit", "w"))
sys.excepthook = sys.unraisablehook = lambda *a: None
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
