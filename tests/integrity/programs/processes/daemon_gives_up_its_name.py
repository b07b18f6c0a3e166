"""Clears its death signal, takes its keepers' name, blocks every signal and leaves its process group.

Each is allowed, and each is something that a keeper might rely on. The fork server goes by the process itself, which
none of this changes. The kernel is right and passes.
"""

libc = ctypes.CDLL(None)
libc.prctl(1, 0, 0, 0, 0)  # PR_SET_PDEATHSIG
libc.prctl(15, b"kq-forkserver", 0, 0, 0)  # PR_SET_NAME
libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.valid_signals()))
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGCHLD):
    signal.signal(number, signal.SIG_IGN)
try:
    os.setpgid(0, 0)
except OSError:
    pass
