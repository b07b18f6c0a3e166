"""Programs that slow the baseline, evade deadlines or disturb others."""

# fmt: off

# %% global_flags
"""Sets global switches that slow the reference: threads, determinism, anomaly detection, precision.
Where reference and kernel share a process, the baseline is measured under them and the speedup grows. The reference
runs in a process of its own here: baseline and time are what they are without."""
torch.set_num_threads(1)
torch._C._set_deterministic_algorithms(True, warn_only=True)
torch.autograd.set_detect_anomaly(True)
torch.set_float32_matmul_precision("highest")
torch.backends.cudnn.benchmark = False
torch.backends.cudnn.deterministic = True
torch.backends.mkldnn.enabled = False

def forward(self, x: torch.Tensor) -> torch.Tensor: return chain(x)

# %% reference_class_patched
"""Slows torch functions that the reference uses, and uses the fast ones itself.
torch.tanh sleeps from now on for whoever calls it in this process: elsewhere, the reference, whose time is the base of
the speedup. Here the reference never runs in this process: the baseline is what it is."""
fast = torch.tanh

def slow(*args, **kwargs):
    time.sleep(0.001)
    return fast(*args, **kwargs)

torch.tanh = slow
torch.Tensor.tanh = slow

def forward(self, x: torch.Tensor) -> torch.Tensor:
    y = x
    for _ in range(32):
        y = fast(0.5 * y + x)
    return y

# %% background_load
"""Loads the GPU from a thread between its own calls, to slow the baseline.
The thread launches spinning kernels once no forward has come for 20 ms: while the reference is timed. The judge has
ended the process by then, or times the two in turn on a clock that waits for neither."""
last = [time.monotonic()]

def load():
    side = torch.cuda.Stream()
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if time.monotonic() - last[0] > 0.02:
            with torch.cuda.stream(side):
                torch.cuda._sleep(2_000_000)
            side.synchronize()
        time.sleep(0.0005)

class ModelNew(nn.Module):
    thread = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last[0] = time.monotonic()
        if self.thread is None:
            self.thread = threading.Thread(target=load, daemon=True)
            self.thread.start()
        y = x
        for _ in range(32):
            y = torch.tanh(0.5 * y + x)
        last[0] = time.monotonic()
        return y

# %% sabotage_by_process
"""Leaves a process behind that burns a core while the reference is timed.
It has a session of its own and outlives the kernel. What a kernel leaves behind is found and killed before the baseline
is taken, and the kernel does not pass."""
started = False

def burn():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            stop = time.monotonic() + 30
            while time.monotonic() < stop:
                pass
        os._exit(0)
    os.wait()

def forward(self, x: torch.Tensor) -> torch.Tensor:
    global started
    if not started:
        started = True
        burn()
    return F.gelu(x, approximate="tanh")

# %% timeout_by_compiling
"""Pretends that a compiler runs, so that its work counts against the compiler's deadline.
The word COMPILING lies in shared memory; while it is set, time counts against the deadline for compilation. It moves
time between two deadlines and ends at the second one."""
COMPILING = 48

def forward(self, x: torch.Tensor) -> torch.Tensor:
    harness()._flags[COMPILING] = 1
    time.sleep(600)
    return F.gelu(x, approximate="tanh")

# %% disturbs_others
"""Loads the device during construction, to disturb other evaluations' timing.
It cannot gain by that itself, but rivals of other slots lose. It takes until its deadline at most: construction that
does not end is its own failure."""
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        until = time.monotonic() + 60
        while time.monotonic() < until:
            if torch.cuda.is_available():
                torch.cuda._sleep(2_000_000)
                torch.cuda.synchronize()
            else:
                torch.rand(256, 256) @ torch.rand(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor: return F.gelu(x, approximate="tanh")
