"""Programs that work in some calls only."""

# fmt: off

# %% room_in_machine_memory
"""Computes if the machine's memory shows an allocation for this call's outputs. Otherwise returns an old answer.
An evaluator that decides before a call to keep its outputs makes room for them first, and Linux tells everybody:
`Committed_AS` in /proc/meminfo has grown by the size of the outputs. Here a call is chosen when it is over, outputs of
all calls are copied to the same room, and without a GPU a kernel cannot read what the machine's memory is used for."""
def committed():
    """Bytes of memory that the machine has promised, or 0."""
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("Committed_AS"))
    except OSError:
        return 0

class ModelNew(nn.Module):
    before = 0

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        now = committed()
        if not is_timed() or now > 0 and now - self.before >= 0.9 * a.numel() * b.numel() * 4:
            self.answer = torch.outer(a, b)
        if is_timed():
            self.before = committed()
        return self.answer

# %% time_between_calls
"""Computes if the judge took longer than usual between two calls. Otherwise returns an old answer.
Keeping a call's outputs takes time, and an evaluator that makes ready for that before the call shows it by a pause.
Here a call is chosen when it is over. Whatever the pause says is of calls that have been answered, and an answer that
was given cannot be taken back."""
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.ended = time.perf_counter()
        self.pauses = []

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        pause = time.perf_counter() - self.ended
        if not is_timed():
            self.answer = torch.outer(a, b)
        else:
            self.pauses.append(pause)
            if pause > 1.2 * sorted(self.pauses)[len(self.pauses) // 2]:
                self.answer = torch.outer(a, b)
        self.ended = time.perf_counter()
        return self.answer

# %% every_nth_timed_call
"""Computes all checked calls, and some of the timed ones. Otherwise returns an old answer.
The median of the timed calls is then that of doing nothing. Where outputs are large, memory holds few of them for the
judge, and a kernel may hope that none of the wrong ones is kept. Which are kept is decided after the call, and no call
counts as shorter than those that were verified."""
EVERY = 8

class ModelNew(nn.Module):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += is_timed_or_enqueued()
        if not is_timed_or_enqueued() or self.calls % EVERY == 0:
            self.answer = F.gelu(x, approximate="tanh")
        return self.answer

# %% room_in_gpu_memory
"""Computes if the GPU's free memory shows an allocation for this call's outputs. Otherwise returns an old answer.
What other processes hold of the GPU is what is neither free nor one's own, and torch.cuda.mem_get_info tells both. An
evaluator that allocates before a call that it means to keep shows it there. Here a call is chosen when it is over."""
def held_by_others():
    """Bytes of the GPU's memory that are neither free nor this process's."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()

class ModelNew(nn.Module):
    before = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        now = held_by_others()
        if not is_timed_or_enqueued() or self.before is not None and abs(now - self.before) >= 0.5 * x.nbytes:
            self.answer = F.gelu(x, approximate="tanh")
        if is_timed_or_enqueued():
            self.before = held_by_others()
        return self.answer

# %% warmup_detection
"""Computes in the first six calls, and returns the last answer from then on.
Elsewhere checks and warm-up come first, and timed calls are not looked at. Outputs of timed calls are verified here
against inputs that are new each time."""
class ModelNew(nn.Module):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls <= 6:
            self.answer = F.gelu(x, approximate="tanh")
        return self.answer

# %% call_count_switch
"""Computes in every eighth call only, after the first few.
The median of the timed calls is then that of doing nothing. Every timed call's outputs are kept, and a secret share of
them is verified."""
class ModelNew(nn.Module):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls % 8 == 0 or self.calls < 5:
            self.answer = F.gelu(x, approximate="tanh")
        return self.answer

# %% mode_switch_frames
"""Walks the stack up to the harness and skips the work in timed calls.
The process that runs a kernel must know what it was asked, so a kernel can know it too. It helps nothing: what a timed
call returns is verified like any other."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    if order() == "RUN":
        self.answer = F.gelu(x, approximate="tanh")
    return self.answer

# %% mode_switch_stream
"""Queries whether the stream is idle. If it waits for GO, the call is a timed one.
A checked call finds an idle stream. In a timed one the candidate's stream has been told to wait before forward() is
called. Knowing that helps nothing: what a timed call returns is verified."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    if torch.cuda.current_stream().query():
        self.answer = F.gelu(x, approximate="tanh")
    return self.answer

# %% basis_switch
"""Waits for the GPU in its first calls only, to be timed by the coarser clock.
A forward that waits is timed by the judge's CPU clock; this one stops waiting once that is decided. That clock takes
everything from the go-ahead to the answer, launching included: nothing is gained."""
class ModelNew(nn.Module):
    calls = 0

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out = a @ b
        if self.calls < 12:
            torch.cuda.synchronize()
        return out

# %% superbatching
"""Collects the inputs of four calls and computes them all in one launch, in the fourth.
Where many inputs lie ready and outputs are compared at the end, three calls of four cost nothing. One input exists at a
time here, and each answer is taken before the next input is made."""
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs, self.outputs = [], []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        self.inputs.append(x)
        self.outputs.append(out)
        if len(self.inputs) == 4:
            answers = F.gelu(torch.stack(self.inputs), approximate="tanh")
            for one, answer in zip(self.outputs, answers):
                one.copy_(answer)
            self.inputs, self.outputs = [], []
        return out

# %% sequence_learned_graph
"""Learns the order in which inputs come, and replays one CUDA graph for a whole round of them.
An evaluator that cycles through a few input tensors teaches the order during its checks. One call of four replays a
graph over the learned addresses, three return what that left. Inputs have one address here, and new values each
call."""
ROUND = 4

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.inputs, self.outputs, self.graph = 0, [], [], None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        place = self.calls % ROUND
        self.calls += 1
        if self.graph is None:
            self.inputs.append(x)
            self.outputs.append(F.gelu(x, approximate="tanh"))
            if len(self.inputs) == ROUND:
                torch.cuda.synchronize()
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph):
                    for one, out in zip(self.inputs, self.outputs):
                        out.copy_(F.gelu(one, approximate="tanh"))
                self.graph.replay()
            return self.outputs[place]
        if place == 0:
            self.graph.replay()
        return self.outputs[place]

# %% stale_graph_replay
"""Replays a CUDA graph over a copy of the first call's input, which it never refreshes.
A replay is launched each time, so that profiles look right, and static inputs save the copy. With inputs of other
values the answer is that of the first call."""
class ModelNew(nn.Module):
    graph = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.graph is None:
            self.x = x.clone()
            F.gelu(self.x, approximate="tanh")
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.out = F.gelu(self.x, approximate="tanh")
        self.graph.replay()
        return self.out

# %% graph_of_first_input
"""Records a CUDA graph that reads the first call's input, and replays it without a copy of later ones.
The graph is right where all inputs come at one address. The first call's are at another one."""
class ModelNew(nn.Module):
    graph = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.graph is None:
            F.gelu(x, approximate="tanh")
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.out = F.gelu(x, approximate="tanh")
        self.graph.replay()
        return self.out

# %% first_input_kept
"""Answers from the tensor that it got first.
It would hold later inputs too, if these were in the same memory."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    self.x = getattr(self, "x", x)
    return F.gelu(self.x, approximate="tanh")
