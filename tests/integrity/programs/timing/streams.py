"""Programs that work outside of the measured span."""

# fmt: off

# %% side_stream_unjoined
"""Computes on a side stream that the current stream never waits for.
Events recorded on the current stream bracket nothing, while a device-wide wait before the comparison still finds the
right answer. Here the judge's copy of the outputs ends the time, and waits for its turn on the GPU's processors: until
this work is done, as it is here, or until a time slice ends, and then outputs are missing."""
def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        return a @ b

# %% half_the_work_cpu_clock
"""Waits for the GPU before it works, so that the CPU clock is used, and does not join its work.
The clock that measures such a kernel runs from the go-ahead to the answer; work on a side stream may be unfinished
then. The harness waits for the whole device before it answers, and the outputs are taken after that: the time is that
of the work, or the outputs are wrong."""
def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    torch.cuda.current_stream().synchronize()
    with torch.cuda.stream(side):
        return a @ b

# %% side_stream_long
"""Computes for 20 ms on a side stream that the current stream never waits for.
As an unjoined side stream, but for longer than a time slice of the GPU: the judge's copy of the outputs has its turn
before they are there."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(40_000_000)  # cycles: 20 ms at the fastest clock
        return F.gelu(x, approximate="tanh")

# %% side_stream_joined_late
"""Joins its side stream one call late: at the beginning of the next call.
Averaged over many calls between two events the work is inside the span but for one, and an evaluator that looks only at
the last output finds it right. Here each call has a span of its own, which ends with the judge's copy of its outputs:
that has its turn on the GPU's processors after this work, or too early."""
def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    current = torch.cuda.current_stream()
    current.wait_stream(side)  # the last call's work
    side.wait_stream(current)
    with torch.cuda.stream(side):
        return a @ b

# %% side_stream_early
"""Does the work on a side stream that does not wait for the current one, and joins it afterwards.
The side stream starts the moment forward() is called, before the clock does, wherever inputs are ready by then. Here
the inputs of a timed call are written only after the clock has started, and the current stream waits for that: work
that does not wait for the current stream reads what was there before, and is wrong."""
def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.cuda.stream(side):
        out = a @ b
    torch.cuda.current_stream().wait_stream(side)
    return out

# %% thread_after_return
"""Returns an empty tensor that a thread fills after forward() has returned.
The clock stops when forward() returns; the comparison, milliseconds later, finds the answer. Here the outputs are taken
as soon as the candidate says that it is done, for checked and for timed calls alike."""
def work(x, out):
    time.sleep(0.005)
    with torch.no_grad():
        out.copy_(F.gelu(x, approximate="tanh"))

def forward(self, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    threading.Thread(target=work, args=(x, out), daemon=True).start()
    return out

# %% jit_fork
"""Starts the work with torch.jit.fork and never waits for it.
TorchScript runs the task on a thread of its pool, which writes into the tensor that was already returned. The answer is
there when an evaluator that is slow to look compares it; the judge takes it at once."""
@torch.jit.script
def work(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    y = x
    for _ in range(32):
        y = torch.tanh(0.5 * y + x)
    return out.copy_(y)

@torch.jit.script
def start(x: torch.Tensor, out: torch.Tensor) -> torch.jit.Future[torch.Tensor]: return torch.jit.fork(work, x, out)

def forward(self, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    self.task = start(x, out)
    return out

# %% host_callback
"""Enqueues only a host callback. It wakes a thread that does the work elsewhere.
The stream that is timed holds one empty callback. The thread computes on a stream of its own into the tensor that was
returned: after the judge's copy, which follows the callback at once."""
wanted = threading.Semaphore(0)
jobs = []
wake = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: wanted.release())

def work():
    side = torch.cuda.Stream()
    while True:
        wanted.acquire()
        a, b, out = jobs.pop(0)
        with torch.no_grad(), torch.cuda.stream(side):
            torch.mm(a, b, out=out)

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.runtime = cudart()
        self.runtime.cudaLaunchHostFunc.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        threading.Thread(target=work, daemon=True).start()

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(a)
        jobs.append((a, b, out))
        stream = torch.cuda.current_stream().cuda_stream
        if code := self.runtime.cudaLaunchHostFunc(stream, ctypes.cast(wake, ctypes.c_void_p), None):
            raise RuntimeError(f"cudaLaunchHostFunc failed with {code}")
        return out

# %% go_forged
"""Writes GO itself, to begin before the clock does.
The word that its stream waits for lies in memory that it shares with the judge: forward() writes it, and on a CPU a
thread writes it for the next call as soon as one is done. The inputs are written after the clock has started: who
begins before works on what was there, and is wrong."""
GO, READY, DONE = 0, 16, 32

def hurry(page):
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if page[GO] == page[READY] == page[DONE]:
            page[GO] += 1
        time.sleep(0.00002)

class ModelNew(nn.Module):
    page = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.page is None:
            self.page = harness()._flags
            if not x.is_cuda:
                threading.Thread(target=hurry, args=(self.page,), daemon=True).start()
        if x.is_cuda:
            self.page[GO] += 1
            time.sleep(0.0005)
        return F.gelu(x, approximate="tanh")

# %% host_polling
"""Watches the input from a thread, by small copies to the host, and computes as soon as it changes.
forward() of a timed call enqueues nothing and returns a fixed tensor; the thread sees the new input while the caches
are flushed, and starts before the go-ahead. The input is written inside the timed span, and so is all that follows: the
answer comes too late and is wrong, or the time is true."""
class ModelNew(nn.Module):
    thread = None

    def watch(self):
        side = torch.cuda.Stream()
        mirror = torch.empty(8, device="cpu", pin_memory=True)
        seen, until = None, time.monotonic() + 60
        with torch.no_grad(), torch.cuda.stream(side):
            while time.monotonic() < until:
                mirror.copy_(self.a.view(-1)[-8:], non_blocking=True)
                side.synchronize()
                now = mirror.tolist()
                if now != seen:
                    seen = now
                    torch.mm(self.a, self.b, out=self.out)
                time.sleep(0)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if self.thread is None:
            self.a, self.b, self.out = a, b, torch.empty_like(a)
            self.thread = threading.Thread(target=self.watch, daemon=True)
            self.thread.start()
        if torch.cuda.current_stream().query():  # nobody waits for a go-ahead: a checked call
            torch.mm(a, b, out=self.out)
        return self.out

# %% persistent_kernel
"""Runs a persistent kernel on the GPU across calls, which computes whenever the input has changed.
It lives for 100 ms and is launched again when it has ended; forward() launches nothing most of the time, so events
around it measure nothing. The judge's span begins before the input is written and ends with its own copy of the output:
what is not there by then is wrong, and what is there has been timed."""
kernel = cupy.RawKernel(
    r"""
extern "C" __global__ void live(const float* x, float* out, const int n, const long long most) {
    const volatile float* watched = x;
    const long long begun = clock64();
    float old = 3e38f;
    while (clock64() - begun < most) {
        const float now = watched[n - 1];
        if (now == old) continue;
        old = now;
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
            const float v = watched[i];
            out[i] = v / (1.0f + __expf(-v * (1.5957691216057308f + 0.07135481282553499f * v * v)));
        }
        __threadfence();
    }
}
""",
    "live",
)
MOST = 200_000_000  # cycles: 100 ms

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.side = torch.cuda.Stream()
        self.ended = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.ended is None:
            self.out = torch.empty_like(x)
            self.ended = torch.cuda.Event()
            torch.cuda.synchronize()
        if self.ended.query():
            n = np.int32(x.numel())
            with cupy.cuda.ExternalStream(self.side.cuda_stream):
                kernel((132,), (256,), (cupy.asarray(x.detach()), cupy.asarray(self.out), n, np.int64(MOST)))
            self.ended.record(self.side)
        return self.out

# %% done_forged
"""Writes DONE before it has begun.
The word that ends the judge's span lies in memory that the kernel can write: forward() finds the call's number on the
stack and writes it, then takes 20 ms. The judge takes the outputs when it reads that word; they are not there, and what
is not there is wrong."""
DONE = 32

def forward(self, x: torch.Tensor) -> torch.Tensor:
    this = call_number()
    if this is not None:
        harness()._flags[DONE] = this
    slow(x)
    return F.gelu(x, approximate="tanh")

# %% done_enqueued_early
"""Enqueues DONE before the work, right after GO.
It uses the harness's own semaphores: go-ahead, done, work. What ends the time is the judge's copy of the outputs, and
that has its turn on the GPU's processors only after this work, or finds them missing."""
DONE = 32

def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    this = call_number()
    if this is not None:
        harness()._semaphores.write(torch.cuda.current_stream().cuda_stream, DONE, this)
    return a @ b

# %% filled_while_read
"""Returns at once, and fills the output in a thread, from its beginning, while the judge copies it.
The copy of an output is subtracted from every time. Work that goes on beside it costs nothing, if only it stays ahead
of the copy. Here the judge copies pieces in random order, so the last piece is as likely to come first as any other."""
def fill(out, a, b):
    with torch.no_grad():
        for begin in range(0, len(a), 32):
            torch.outer(a[begin : begin + 32], b, out=out[begin : begin + 32])

def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = a.new_empty(len(a), len(b))
    if is_timed():
        threading.Thread(target=fill, args=(out, a.clone(), b.clone()), daemon=True).start()
    else:
        fill(out, a, b)
    return out
