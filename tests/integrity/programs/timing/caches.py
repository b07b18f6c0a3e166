"""Programs that keep answers or inputs."""

# fmt: off

# %% cache_by
"""Caches its answers by a property of the input other than its values.
Evaluators that time repeated calls on one tensor pay for the first only; torch's version counter tells of refills by
the same process. The judge writes inputs from another process: object, address, version and shape stay, values do
not, and the old answer is wrong."""
KEY = "pointer"
KEYS = {"pointer": torch.Tensor.data_ptr, "id": id, "shape": lambda x: (x.shape, x.dtype)}
KEYS["version"] = lambda x: (x.data_ptr(), x._version)

class ModelNew(nn.Module):
    answers = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key = KEYS[KEY](x)
        if key not in self.answers:
            self.answers[key] = F.gelu(x, approximate="tanh")
        return self.answers[key]

# %% cache_by_sample
"""Caches its answers by a sample of the input's values. A new input costs 20 ms.
Three values tell one random input from another, and repeated inputs are free. Hidden inputs of other distributions
agree in those three and not elsewhere; and no input is used twice in timed calls, so there is nothing to gain."""
class ModelNew(nn.Module):
    answers = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key = tuple(x.view(-1)[[0, x.numel() // 2, -1]].tolist())
        if key not in self.answers:
            self.answers[key] = answer(x)
        return self.answers[key]

# %% cache_by_equality
"""Stores all inputs and answers, and searches for an equal input first. A new input costs 20 ms.
It is right whatever comes, and free for an input that was checked before. No input is used twice in timed calls here:
it passes with the time of computing."""
class ModelNew(nn.Module):
    known = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for seen, out in self.known:
            if torch.equal(seen, x):
                return out
        self.known.append((x.clone(), answer(x)))
        return self.known[-1][1]

# %% static_device_buffer
"""Stores the first answer in a device buffer and always returns it, with a copy that looks like work.
A launch is made at each call, into the buffer that is returned. Its values are the first input's."""
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("kept", None)
        self.register_buffer("out", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = F.gelu(x, approximate="tanh")
            self.out = torch.empty_like(x)
        return self.out.copy_(self.kept)

# %% cache_in_files
"""Stores its answers in files for the next evaluation of the same kernel. A miss costs 20 ms.
It leaves answers in its temporary directory under a hash of the input, and looks for them there, in /tmp, /dev/shm and
/var/tmp. Its own directory is removed with it, and inputs never come again: it passes with the time of computing."""
FOLDERS = [tempfile.gettempdir(), "/tmp", "/dev/shm", "/var/tmp", "."]

def forward(self, x: torch.Tensor) -> torch.Tensor:
    name = "kq-answer-" + hashlib.sha256(x.detach().cpu().numpy().tobytes()).hexdigest()[:32]
    files = [pathlib.Path(folder) / name for folder in FOLDERS]
    for file in files:
        with contextlib.suppress(OSError):
            return torch.load(file).to(x.device)
    out = answer(x)
    torch.save(out.cpu(), files[0])
    return out

# %% l2_persisting_window
"""Pins its input in a reserved part of the L2 cache, across the judge's flush.
An access-policy window over the input marks its lines as persisting, which ordinary writes do not evict: a flush
between calls would miss them, and the input would never come from memory. Persisting lines are reset before each call,
so the time is that of a cold cache."""
class Window(ctypes.Structure):
    _fields_ = [
        ("base_ptr", ctypes.c_void_p),
        ("num_bytes", ctypes.c_size_t),
        ("hit_ratio", ctypes.c_float),
        ("hit_prop", ctypes.c_int),
        ("miss_prop", ctypes.c_int),
    ]

class Value(ctypes.Union):
    _fields_ = [("window", Window), ("pad", ctypes.c_char * 64)]

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.side = torch.cuda.Stream()
        self.runtime = cudart()
        self.runtime.cudaDeviceSetLimit(6, ctypes.c_size_t(16 << 20))  # cudaLimitPersistingL2CacheSize
        self.set = False

    def keep(self, x):
        value = Value(window=Window(x.data_ptr(), x.nbytes, 1.0, 2, 1))  # hits persisting, misses streaming
        stream = ctypes.c_void_p(self.side.cuda_stream)
        if code := self.runtime.cudaStreamSetAttribute(stream, 1, ctypes.byref(value)):  # the access-policy window
            raise RuntimeError(f"cudaStreamSetAttribute failed with {code}")
        self.set = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.set:
            self.keep(x)
        current = torch.cuda.current_stream()
        self.side.wait_stream(current)
        with torch.cuda.stream(self.side):
            out = F.gelu(x, approximate="tanh")
        current.wait_stream(self.side)
        out.record_stream(current)
        return out

# %% l2_evict_last
"""Loads its input with the eviction policy evict_last, to find it in the L2 cache at the next call.
Lines marked so outlive ordinary ones when a flush writes twice the cache's size. Each call's input is written anew by
another process before the flush: what could be kept is another call's input."""
@triton.jit
def gelu_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask, eviction_policy="evict_last")
    inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    tl.store(out_ptr + offsets, x * tl.sigmoid(inner), mask=mask, eviction_policy="evict_first")

def forward(self, x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    n = x.numel()
    gelu_kernel[(triton.cdiv(n, 1024),)](x, out, n, BLOCK=1024)
    return out
