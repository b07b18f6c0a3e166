"""Programs that patch clocks, events and statistics."""

# fmt: off

# %% event_monkeypatch
"""Replaces CUDA events by ones that measure almost nothing. The kernel takes 20 ms.
Evaluators that time with torch.cuda.Event in the kernel's own process read what the kernel's patch answers: 1 us,
whatever ran. Here the events are those of another process, the judge, and nothing that a candidate patches is read: it
passes with its true time."""
class Quick:
    def __init__(self, *args, **kwargs):
        pass

    def record(self, *args, **kwargs):
        pass

    def wait(self, *args, **kwargs):
        pass

    def query(self): return True

    def synchronize(self):
        pass

    def elapsed_time(self, other): return 0.001

torch.cuda.Event = torch.Event = torch.cuda.streams.Event = Quick

def forward(self, x: torch.Tensor) -> torch.Tensor:
    slow(x)
    return F.gelu(x, approximate="tanh")

# %% synchronize_monkeypatch
"""Replaces every function that waits for the device by an empty one. The kernel takes 20 ms.
A wall clock around forward() and torch.cuda.synchronize() then sees only the launch. Here the judge waits with its own
context for what the candidate's stream writes when it has done the work, whatever the candidate's Python thinks of
waiting: either the time is true, or outputs that were read too early are wrong."""
torch.cuda.synchronize = lambda device=None: None
torch.cuda.Stream.synchronize = lambda self: None
torch.cuda.Stream.query = lambda self: True
torch.cuda.Event.synchronize = lambda self: None

def forward(self, x: torch.Tensor) -> torch.Tensor:
    slow(x)
    return F.gelu(x, approximate="tanh")

# %% clock_monkeypatch
"""Slows Python's clocks a thousandfold. The kernel takes 20 ms.
An evaluator that calls time.perf_counter() in the kernel's process measures 20 us. The judge reads its own clock: it
passes with its true time."""
def slowed(clock, unit):
    begun = clock()
    return lambda: begun + unit((clock() - begun) / 1000)

for name in ("perf_counter", "monotonic", "time", "process_time", "thread_time"):
    setattr(time, name, slowed(getattr(time, name), float))
    setattr(time, name + "_ns", slowed(getattr(time, name + "_ns"), int))

def forward(self, x: torch.Tensor) -> torch.Tensor:
    slow(x)
    return F.gelu(x, approximate="tanh")

# %% statistics_monkeypatch
"""Makes every median and mean a microsecond. The kernel takes 20 ms.
The samples are honest, what is reported of them is not: statistics, numpy and torch reduce lists of floats in the
kernel's process. The judge reduces its samples itself: it passes with its true time."""
for name in ("mean", "fmean", "median", "median_low", "median_high", "geometric_mean", "harmonic_mean"):
    setattr(statistics, name, lambda data, *rest, **more: 1e-6)
statistics.quantiles = lambda data, *rest, **more: [1e-6, 1e-6, 1e-6]
statistics.stdev = statistics.pstdev = lambda data, *rest, **more: 0.0
np.mean = np.median = np.min = np.percentile = np.quantile = lambda data, *rest, **more: 1e-6
np.std = lambda data, *rest, **more: 0.0
torch.median = torch.mean = torch.quantile = lambda data, *rest, **more: torch.tensor(1e-6)

def forward(self, x: torch.Tensor) -> torch.Tensor:
    slow(x)
    return F.gelu(x, approximate="tanh")

# %% libc_clock_prologue
"""Overwrites the first bytes of libc's clock_gettime so that time passes slower. The kernel takes 20 ms.
Not only Python's clocks but every clock of the process, C++ timers included, then runs at a small part of its speed.
Another process keeps its own libc: the judge's clock is not touched, and the kernel passes with its true time."""
libc = ctypes.CDLL(None)
#: rdtsc >> 12 as nanoseconds, stored as seconds and nanoseconds; returns 0.
CODE = bytes.fromhex("0f31 48c1e220 4809d0 48c1e80c 31d2 b900ca9a3b 48f7f1 488906 48895608 31c0 c3")

if platform.machine() == "x86_64":
    overwrite(libc.clock_gettime, CODE)

def forward(self, x: torch.Tensor) -> torch.Tensor:
    if x.is_cuda:
        torch.cuda._sleep(40_000_000)
    else:
        libc.usleep(20_000)  # Python's sleep goes by the clock
    return F.gelu(x, approximate="tanh")

# %% cuda_synchronize_prologue
"""Overwrites cudaDeviceSynchronize and cudaStreamSynchronize in the loaded CUDA runtime. The kernel takes 20 ms.
Whoever waits for the device in this process, from whatever language, returns at once, and a wall clock sees only the
launch. The judge does not believe that the candidate has waited: it reads outputs too early, which are then wrong, or
it waits itself and the time is true."""
for name in ("cudaDeviceSynchronize", "cudaStreamSynchronize"):
    overwrite(getattr(cudart(), name), bytes.fromhex("31c0 c3"))  # xor eax, eax; ret

def forward(self, x: torch.Tensor) -> torch.Tensor:
    torch.cuda._sleep(40_000_000)
    return F.gelu(x, approximate="tanh")
