"""Has itself killed by SIGKILL, to be taken for a victim of the fleet and be tried again and again.

A filter refuses it each way to send that to itself: calls, timers, descriptors, limits, the end of a child. It fails
to die, and passes. Without the filter (``seccomp`` in ``kqueue doctor``) it would end as ``worker_lost``.
"""

COLUMN = platform.machine() == "aarch64"


def call(numbers, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.syscall(ctypes.c_long(numbers[COLUMN]), *(ctypes.c_long(argument) for argument in arguments))


def expire(number):
    event = (ctypes.c_int * 16)(0, 0, int(number), 0)
    timer = ctypes.c_int()
    if call((222, 107), 1, ctypes.addressof(event), ctypes.addressof(timer)) == 0:
        call((223, 110), timer.value, 0, ctypes.addressof((ctypes.c_long * 4)(0, 0, 0, 1)), 0)
        signal.pause()


def by_a_child(number):
    if os.fork() == 0:
        try:
            os.kill(os.getppid(), number)
        finally:
            os._exit(0)
    os.wait()


def by_the_end_of_a_child(number):
    if call((56, 220), int(number), 0, 0, 0, 0) == 0:
        os._exit(0)


def by_a_descriptor(number):
    reader, writer = os.pipe()
    fcntl.fcntl(reader, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(reader, 10, int(number))
    fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC)
    os.write(writer, b"x")


def attack():
    mine = os.getpid()
    for number in (signal.SIGKILL, signal.SIGTERM):
        for attempt in (
            lambda: os.kill(mine, number),
            lambda: os.kill(0, number),
            lambda: os.killpg(mine, number),
            lambda: signal.raise_signal(number),
            lambda: signal.pthread_kill(threading.get_ident(), number),
            lambda: call((200, 130), mine, number),
            lambda: call((129, 138), mine, number, ctypes.addressof((ctypes.c_int * 32)(int(number), 0, -1))),
            lambda: expire(number),
            lambda: by_a_child(number),
            lambda: by_a_descriptor(number),
            lambda: by_the_end_of_a_child(number),
        ):
            try:
                attempt()
            except OSError:
                continue
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (0, 0))
        while True:
            pass
    except (OSError, ValueError):
        pass


def forward(self, x):
    attack()
    return x * 2 + 1
