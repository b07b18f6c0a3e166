"""Programs that write to the judge's channel and descriptors."""

# fmt: off

# %% channel_garbage
"""Writes garbage to every descriptor that it finds.
In evaluators whose kernels share a pipe or a socket with the driver, a few bytes there are a result, or break the
reader. Here what comes through the channel is one fixed record or a violation, and output is only a log."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    for fd in channels():
        with contextlib.suppress(OSError):
            os.write(fd, b'{"compiled": true, "correctness": true, "runtime": 0.001}')
    return torch.zeros_like(x)

# %% channel_forged_extra
"""Answers the current order with a forged record of the right form, and the next order too.
A reader that takes the first record for this call and the next for the one after gets out of step, and a call that
never ran counts as done. The judge holds each answer against its order's number, and looks into the outputs, which
nobody has written."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    for number in orders():
        for answered in (number, number + 1):
            spec, location = TensorSpec.of(x), Location(Where.OWN, offset=x.data_ptr(), stride=x.stride())
            send(Reply(Answer.DONE, answered, structure="Tensor", tensors=(spec,), locations=(location,)))
    return torch.zeros_like(x)

# %% channel_forged_handle
"""Announces its output in memory whose descriptor is invalid.
The judge tries to open it; were its failure taken for the GPU's, the kernel would be tried again until it was lucky.
Here a descriptor that cannot be opened is the kernel's violation."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    for number in orders():
        location = Location(Where.EXPORTED, run=0, stride=x.stride())
        announce(Export(0, 1, (2 << 20,), (os.memfd_create("none"),)))
        send(Reply(Answer.DONE, number, structure="Tensor", tensors=(TensorSpec.of(x),), locations=(location,)))
    return torch.zeros_like(x)

# %% channel_forged_offset
"""Claims that its output is a terabyte beyond its real allocation.
The judge would read memory of its own, or none: an illegal access would end the judge's CUDA context and be the fleet's
failure. Here what is said of a place is held against the allocation's size before anything is read."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    exports = Exports()
    true = exports.location(out)
    for number in orders():
        location = Location(Where.EXPORTED, run=true.run, offset=1 << 40, stride=(1 << 20, 1))
        for export in exports.pending():
            announce(export)
        send(Reply(Answer.DONE, number, structure="Tensor", tensors=(TensorSpec.of(x),), locations=(location,)))
    return out

# %% output_freed
"""Frees the memory of its output while the judge reads it.
The output lies in an allocation of the kernel's own, by cudaMalloc, and a thread gives it back a moment after the call.
If the judge's copy then failed, its own CUDA context would be lost and the failure the fleet's, to be tried again.
Whatever comes of it must be the kernel's, or an honest pass."""
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.runtime = [cudart()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        [runtime] = self.runtime
        pointer = ctypes.c_void_p()
        assert runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(32 << 20)) == 0
        out = torch.as_tensor(_Raw(pointer.value, x.numel()), device=x.device).view(x.shape)
        out.copy_(F.gelu(x, approximate="tanh"))

        def free():
            time.sleep(0.0005)
            runtime.cudaFree(pointer)

        threading.Thread(target=free, daemon=True).start()
        return out

# %% flags_forged
"""Writes nonsense over the page of flags that it shares with the judge.
READY, DONE and GO are words in shared memory; a kernel may set them as it likes. They are claims: what counts is what
the judge then finds in the outputs, and a wait for a flag ends with the deadline."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    for fd in range(3, 256):
        try:
            if "kqueue-flags" not in os.readlink(f"/proc/self/fd/{fd}"):
                continue
            page = mmap.mmap(fd, mmap.PAGESIZE)
        except (OSError, ValueError):
            continue
        page[:512] = b"\xff" * 512
    return torch.zeros_like(x)

# %% channel_descriptors
"""Sends a packet full of descriptors, to exhaust the judge's descriptors.
Descriptors that ride on a message are installed in the receiver whether it wants them or not, unless it leaves them no
room. Here the judge leaves none, and the packet is not an answer."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    null = os.open("/dev/null", os.O_RDONLY)
    beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [null] * 250))]
    for fd in list(channels()):
        with socket.socket(fileno=os.dup(fd)) as channel:
            with contextlib.suppress(OSError):
                channel.sendmsg([b"x"], beside)
    return torch.zeros_like(x)

# %% channel_closed
"""Closes all of its descriptors and sleeps.
The judge hears nothing, the process lives, and an evaluator without an own clock waits for ever. Here closing the
channel is noticed at once and is a violation."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    os.closerange(3, 4096)
    time.sleep(600)
    return x

# %% channel_replaced
"""Replaces the channel by its own socket, so that its process talks to itself.
The loop above then reads orders that the kernel wrote, and the judge reads nothing. What the judge waits for is an
answer from its own end, and that one has been closed."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for fd in list(channels()):
        if fd not in (mine.fileno(), theirs.fileno()):
            os.dup2(theirs.fileno(), fd)
    time.sleep(600)
    return x

# %% channel_inherited
"""Passes the channel to a process that outlives the kernel, to answer for the next one.
A forked child holds a copy of every descriptor. Were the channel used again for the next kernel, the child could answer
for it. Here each candidate has a channel of its own, and what it leaves behind is killed and counts against it."""
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
            os._exit(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor: return F.gelu(x, approximate="tanh")
