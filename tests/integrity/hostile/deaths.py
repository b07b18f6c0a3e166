"""Problems that die."""

# fmt: off

# %% abort_in_initial
"""Aborts in ``get_init_inputs``: ``reference_error``."""
def get_init_inputs():
    os.abort()

# %% claims_gpu_memory
"""Says that the GPU's memory ran out, which a busy GPU would be blamed for: ``reference_error``.
The judge ends the process and looks whether its share of the memory is free."""
def forward(self, x):
    raise torch.OutOfMemoryError("CUDA out of memory")

# %% exit_in_inputs
"""Exits with status 0 in ``get_inputs``, as if all were done: ``reference_error``."""
def get_inputs():
    os._exit(0)

# %% hangup
"""Sends itself SIGHUP in ``forward``: ``reference_error``.
Only SIGKILL, which operators send, counts as the fleet's doing."""
def forward(self, x):
    os.kill(os.getpid(), signal.SIGHUP)
    return x * 2 + 1

# %% interrupt_in_forward
"""Raises KeyboardInterrupt in ``forward``: ``reference_error``."""
def forward(self, x):
    raise KeyboardInterrupt

# %% looks_killed
"""Has itself killed by SIGKILL, to be taken for a victim of the fleet and be tried again and again.
A filter refuses it each way to send that to itself: calls, timers, descriptors, limits, the end of a child. It fails to
die, and passes. Without the filter (``seccomp`` in ``kqueue doctor``) it would end as ``worker_lost``."""
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
    number = signal.SIGKILL
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
        with contextlib.suppress(OSError):
            attempt()
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (0, 0))
        while True:
            pass

def forward(self, x):
    attack()
    return x * 2 + 1

# %% names_itself_the_harness
"""Raises an exception that looks like the harness's own word on a malformed problem: ``invalid_problem``.
It may say of itself that it is malformed."""
class ProblemError(Exception):
    __module__ = "workers.judge.candidate.harness"

def get_inputs():
    raise ProblemError("all is well")

# %% raises_when_collected
"""Raises in ``__del__``, of inputs' owners and of the model: nobody hears it, and it passes."""
class Owner:
    def __del__(self):
        raise RuntimeError("from __del__")

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.owner = Owner()

    def forward(self, x):
        Owner()
        return x * 2 + 1

# %% segfault_at_import
"""Reads address 0 when it is imported: ``reference_error``."""
ctypes.string_at(0)

# %% speaks_for_the_seal
"""Prints what a process says whose seal failed, and exits with its status: ``reference_error``.
The seal is reported on a pipe that is closed before foreign code runs."""
def get_inputs():
    for number in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(number, b"PermissionError: the seal failed")
    os._exit(70)

# %% system_exit_in_constructor
"""Raises SystemExit in the constructor: ``reference_error``."""
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        sys.exit(0)

# %% unfit_words
"""Raises an exception with a message of NUL, half characters and a terminal's orders: ``reference_error``.
Texts are bounded, decoded with replacement, and decide nothing."""
def forward(self, x):
    raise type("\ud800" * 500, (Exception,), {})("\0\ud800\x1b]0;owned\a" * 10_000)
