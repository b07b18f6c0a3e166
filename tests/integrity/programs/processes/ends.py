"""Programs that do not end, or end otherwise than they should."""

# fmt: off

# %% oom_score
"""Sets OOM scores to be killed last when memory runs out, and its supervising processes first.
Then a memory bomb takes the judge, which is the fleet's failure. Lowering the score needs a capability that candidates
do not have."""
def attack():
    for pid, score in [("self", "-1000"), *((str(pid), "1000") for pid in keepers())]:
        try:
            with open(f"/proc/{pid}/oom_score_adj", "w") as file:
                file.write(score)
        except OSError:
            continue
        raise RuntimeError(f"ATTACK SUCCEEDED: {pid} now has {score}")

# %% daemon_double_fork
"""Leaves a daemon: forked twice, in a separate session, without the parent-death signal.
It would take GPU time from those who come after, or wait for them. Whoever kills a process group misses it. Here the
orphan becomes the fork server's child and is killed, with everything else of its uid; the kernel fails for it."""
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # PR_SET_PDEATHSIG
        for fd in range(256):
            with contextlib.suppress(OSError):
                os.close(fd)
        time.sleep(600)
    os._exit(0)
os.wait()

# %% daemon_in_disguise
"""Leaves a process that has the fork server's name, ignores all signals and forks when it is searched for.
A sweeper that goes by names spares it, one that lists and then kills comes too late. Here all of the candidate's uid
are killed at once, and orphans one by one."""
if os.fork() == 0:
    os.setsid()
    ctypes.CDLL(None).prctl(15, b"kq-forkserver", 0, 0, 0)  # PR_SET_NAME
    for number in range(1, 65):
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)
    until = time.monotonic() + 30
    while time.monotonic() < until:
        if os.fork():
            os._exit(0)
        time.sleep(0.01)
    os._exit(0)

# %% daemon_thread
"""Starts threads that continue after the call, and registers functions to run at exit.
They would compare, print or answer after the verdict. A process that has been used is ended by SIGKILL: no thread
outlives it and nothing is run at exit. They do nothing here, and the kernel is right and passes."""
atexit.register(os.write, 1, b"I am still here")
threading.Thread(target=time.sleep, args=(600,), daemon=False).start()

# %% timeout_in_c
"""Sleeps in C without releasing the interpreter's lock, with every signal ignored.
A deadline that rests on SIGALRM's Python handler, or on a thread of the same process, never comes. Here another process
watches the clock and kills."""
for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU):
    signal.signal(number, signal.SIG_IGN)

def forward(self, x: torch.Tensor) -> torch.Tensor:
    ctypes.PyDLL(None).sleep(600)
    return x

# %% timeout_stopped
"""Stops itself by SIGSTOP: neither alive nor dead.
It uses no time and ends by no signal but SIGKILL. An evaluator that waits for its exit waits for ever."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    os.kill(os.getpid(), signal.SIGSTOP)
    return x

# %% timeout_fork
"""Forks, and lets the parent exit, so that the child continues beyond the deadline as another process.
Whoever watches one pid sees an exit in time; the child keeps the channel and answers when it likes. Here the exit ends
the kernel, and what remains is killed."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    if os.fork():
        os._exit(0)
    os.setsid()
    return F.gelu(x, approximate="tanh")

# %% memory_children
"""Spreads a memory bomb over children, each of them small.
A limit for one process (RLIMIT_AS, RSS of the main pid) does not see it. Here the memory of the whole tree counts."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    for _ in range(16):
        if os.fork() == 0:
            block = bytearray(b"\x01") * (256 << 20)
            time.sleep(60)
            os._exit(len(block) & 1)
    time.sleep(60)
    return x

# %% memory_unmapped_files
"""Fills memory through in-memory files that no process maps.
Pages written to a memfd count in no process's resident size, so a limit that adds those up does not see them; they are
gone only when the last descriptor is. A cgroup counts them, as does whoever looks at the descriptors."""
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.files = []
        block = b"\x01" * (16 << 20)
        for _ in range(9):
            self.files.append(os.memfd_create("hog"))
            for _ in range(8):
                os.write(self.files[-1], block)

    def forward(self, x: torch.Tensor) -> torch.Tensor: return F.gelu(x, approximate="tanh")

# %% memory_disk
"""Writes a file without end into its directory.
A full disk is everybody's trouble: logs, database, other slots. Here a file has a largest size, and beyond it the write
fails in the kernel that made it."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    with open("hog", "wb") as file:
        for _ in range(1 << 12):
            file.write(b"\x01" * (1 << 20))
    return x

# %% memory_gpu_raw
"""Allocates nearly all of the GPU's memory by cudaMalloc, past torch's limit, and answers correctly.
torch counts what torch allocates. With nothing left the judge, or the kernel of another slot, cannot allocate. (This
one leaves 16 GB, so that the corpus can be judged beside it.) It gains no time, and its end gives all of it back."""
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        runtime = cudart()
        pointer = ctypes.c_void_p()
        while torch.cuda.mem_get_info()[0] > 17 << 30:
            if runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(1 << 30)):
                runtime.cudaGetLastError()
                break

    def forward(self, x: torch.Tensor) -> torch.Tensor: return F.gelu(x, approximate="tanh")

# %% memory_pinned
"""Allocates host memory that the driver pins, and that is in no process's resident size.
Pinned pages cannot be swapped and are counted apart. A limit that adds up resident sizes may not see them; the
operating system runs out all the same."""
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.kept = [torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True).fill_(1) for _ in range(24)]

    def forward(self, x: torch.Tensor) -> torch.Tensor: return F.gelu(x, approximate="tanh")

# %% exit_zero_after_output
"""Exits with status 0 in the middle of a call, after printing a success message.
Evaluators that take a child's exit status for its success pass it. Here a call that was not answered was not made."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    os.write(1, b"PASSED\n")
    os._exit(0)
    return torch.zeros_like(x)

# %% exit_interrupt
"""Raises KeyboardInterrupt, as if a user had pressed Ctrl-C.
Drivers that stop politely on Ctrl-C stop their whole run. Here it is an exception of the kernel's like any other."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    raise KeyboardInterrupt
    return torch.zeros_like(x)

# %% exit_replaced
"""Replaces itself by exec with a program that succeeds.
The pid lives on, exits with status 0, and has no bad word to say. No answer came."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    os.execv("/bin/true", ["true"])
    return torch.zeros_like(x)

# %% exit_killed
"""Kills itself with the signal that the operating system uses when memory runs out.
An evaluator that takes SIGKILL for the host's memory killer blames the host and tries again. Here a filter refuses it:
the call raises PermissionError."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    return torch.zeros_like(x)

# %% exit_wrong_thread
"""Ends its main thread and leaves another one running.
The process becomes a zombie with a living thread: it neither exits nor answers. The deadline ends it."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    ctypes.CDLL(None).syscall(60 if platform.machine() == "x86_64" else 93, 0)  # exit, of this thread alone
    return torch.zeros_like(x)

# %% exit_when_timed
"""Answers checked calls, and exits with status 0 when it believes that a call is timed.
Where correctness was recorded before timing, an exit during timing loses a time and not the verdict. Here a kernel that
does not answer every call has not passed."""
class ModelNew(nn.Module):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 6:
            os._exit(0)
        return F.gelu(x, approximate="tanh")
