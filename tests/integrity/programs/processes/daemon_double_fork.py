"""Leaves a daemon: forked twice, in a session of its own, with its parent's death signal taken off.

It would take GPU time from those who come after, or wait for them. Whoever kills a process group misses it. Here the
orphan becomes the fork server's child and is killed, with everything else of its uid; the kernel fails for it.
"""

if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # PR_SET_PDEATHSIG
        for fd in range(256):
            try:
                os.close(fd)
            except OSError:
                continue
        time.sleep(600)
    os._exit(0)
os.wait()
