"""Problems that take too long."""

# fmt: off

# %% as_compilation
"""Says that a compiler is at work and sleeps, to be given the compilers' time as well: ``reference_timeout``.
That time is limited too, and it has it once."""
def get_inputs():
    caller("page")[48] = 1
    time.sleep(1000)

# %% check_spins
"""Computes for ever in the check of the outputs: ``reference_timeout``. The kernel has passed nothing then."""
CHECK_BOUND = 1e-2
def check(reference_outputs, outputs, inputs):
    while True:
        pass

# %% constructor_stops
"""Stops itself with SIGSTOP in the constructor: ``reference_timeout``."""
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        os.kill(os.getpid(), signal.SIGSTOP)

# %% forward_sleeps
"""Sleeps in ``forward`` when it is called for the third time: ``reference_timeout``."""
def forward(self, x):
    if called() == 3:
        time.sleep(1000)
    return x * 2 + 1

# %% forward_when_timed
"""Sleeps when it is timed as the baseline, and only then: ``reference_timeout``.
The phase of timing has a deadline of its own."""
def forward(self, x):
    if sys._getframe(4).f_code.co_name == "_time" or sys._getframe(5).f_code.co_name == "_time":
        time.sleep(1000)
    return x * 2 + 1

# %% import_sleeps
"""Sleeps when it is imported, for ever: ``reference_timeout``."""
time.sleep(1000)

# %% initial_holds_the_interpreter
"""Sleeps in C in ``get_init_inputs``, so that no Python runs in its process: ``reference_timeout``.
The deadline is kept by the fork server, which needs nothing of the process."""
def get_init_inputs():
    ctypes.PyDLL(None).sleep(1000)

# %% inputs_spin
"""Computes in ``get_inputs`` for ever, deaf to signals: ``reference_timeout``."""
def get_inputs():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    while True:
        pass

# %% unprintable
"""Raises an exception whose text takes for ever to make: ``reference_timeout``."""
class Slow(Exception):
    def __str__(self):
        while True:
            pass

def get_inputs():
    raise Slow
