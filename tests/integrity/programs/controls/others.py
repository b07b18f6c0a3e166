"""Honest kernels that do odd things on the way."""

# fmt: off

# %% dispatch_by_shape
"""Honest: a different code path for each shape.
A table by shape that holds functions, not answers."""
def wide(x): return F.gelu(x, approximate="tanh")
def narrow(x): return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))

class ModelNew(nn.Module):
    paths = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        path = self.paths.setdefault(tuple(x.shape), wide if x.shape[-1] % 128 == 0 else narrow)
        return path(x)

# %% in_place_on_own_buffers
"""Honest: in-place operations on the kernel's own buffers.
The input is only read; everything that is written belongs to the kernel."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    for _ in range(32):
        y.mul_(0.5).add_(x).tanh_()
    return y

# %% jit_fork_waited
"""Honest: torch.jit.fork, waited for.
The task's result is what is returned."""
@torch.jit.script
def work(x: torch.Tensor) -> torch.Tensor:
    y = x
    for _ in range(32):
        y = torch.tanh(0.5 * y + x)
    return y

@torch.jit.script
def start_and_wait(x: torch.Tensor) -> torch.Tensor: return torch.jit.wait(torch.jit.fork(work, x))
def forward(self, x: torch.Tensor) -> torch.Tensor: return start_and_wait(x)

# %% mlp
"""Honest: two linear layers with weights.
Weights come from the same constructor and seed as the reference's."""
class ModelNew(nn.Module):
    def __init__(self, features: int, hidden: int):
        super().__init__()
        self.up = nn.Linear(features, hidden)
        self.down = nn.Linear(hidden, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.addmm(self.up.bias, x, self.up.weight.t())
        return torch.addmm(self.down.bias, F.gelu(hidden), self.down.weight.t())

# %% on_the_cpu
"""Honest: GELU on the CPU, there and back.
It waits for the GPU, so the CPU clock times it, and works by copy engines alone: the null that is subtracted must not
hold a turn on the GPU's processors that this call does not take."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return F.gelu(x.cpu(), approximate="tanh").to(x.device)

# %% prepared_weights
"""Honest: weights transposed once, at the first call, and kept.
What depends on the weights alone may be prepared: it is the same at every call."""
class ModelNew(Linear):
    transposed = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.transposed is None:
            self.transposed = self.linear.weight.t().contiguous()
        return torch.relu(torch.addmm(self.linear.bias, x, self.transposed))

# %% streams_joined
"""Honest: two streams, forked from the current one and joined again by events.
Halves of the product run side by side; nothing is left behind when forward() returns."""
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.streams = [torch.cuda.Stream(), torch.cuda.Stream()]

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = torch.empty(a.shape[0], b.shape[1], device=a.device, dtype=a.dtype)
        current = torch.cuda.current_stream()
        fork = current.record_event()
        half = a.shape[0] // 2
        for stream, rows in zip(self.streams, (slice(0, half), slice(half, None))):
            with torch.cuda.stream(stream):
                stream.wait_event(fork)
                torch.mm(a[rows], b, out=out[rows])
                current.wait_event(stream.record_event())
        return out

# %% threads_joined
"""Honest: two threads, joined before forward() returns.
Each computes half of the rows."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)

    def work(rows):
        with torch.no_grad():
            out[rows] = F.gelu(x[rows], approximate="tanh")

    half = x.shape[0] // 2
    threads = [threading.Thread(target=work, args=(rows,)) for rows in (slice(0, half), slice(half, None))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out

# %% through_the_host
"""Honest: a copy of the input through pinned host memory.
Only copy engines work for it, so it does not wait for a turn on the GPU's processors, which a null does: unheeded, it
would come out 0.3 ms faster than it is."""
class ModelNew(nn.Module):
    host = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.host is None:
            self.host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        self.host.copy_(x, non_blocking=True)
        out = torch.empty_like(x)
        out.copy_(self.host, non_blocking=True)
        return out

# %% very_slow
"""Honest: half a second on the GPU, a twentieth on a CPU.
Slow is no fault, and few calls must do for a time."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    if x.is_cuda:
        torch.cuda._sleep(1_000_000_000)
    else:
        time.sleep(0.05)
    return F.gelu(x, approximate="tanh")

# %% waits_by_item
"""Honest: a forward that reads a value of its input on the host.
Such a kernel cannot be enqueued ahead: it is timed by the CPU clock, end to end, and says so."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    if x[0, 0].item() > 1e30:
        return torch.zeros_like(x)
    return F.gelu(x, approximate="tanh")

# %% waits_by_synchronize
"""Honest: a forward that waits for the device before it returns.
Needless, and no cheat: it is timed by the CPU clock, end to end, and says so."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    out = F.gelu(x, approximate="tanh")
    torch.cuda.synchronize()
    return out

# %% workspace
"""Honest: a large workspace allocated and freed at every call.
Half of the work goes through memory that is returned to the allocator before forward() ends."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    workspace = torch.empty((4, *x.shape), dtype=x.dtype, device=x.device)
    workspace[0] = x * x * x
    workspace[1] = 0.7978845608028654 * (x + 0.044715 * workspace[0])
    workspace[2] = torch.tanh(workspace[1])
    return 0.5 * x * (1.0 + workspace[2])
