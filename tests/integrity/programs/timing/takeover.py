"""Programs that take the harness over, or what is subtracted."""

# fmt: off

# %% null_slowed
"""Slows the calls without a forward, whose time is subtracted as overhead.
It wraps the harness's handler: where the order is a null, the call takes 10 ms between go-ahead and answer. Subtracted
from the kernel's own 20 ms that would leave half. The judge takes a null of a process that runs the reference too, and
the smaller of the two counts."""
class ModelNew(nn.Module):
    done = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.done:
            slow_nulls(harness(), x.is_cuda)
            self.done = True
        take(x.is_cuda, 20)
        return F.gelu(x, approximate="tanh")

# %% null_slowed_dense
"""Returns a dense output where the reference's is expensive to copy, and slows the calls without a forward.
What a call costs beside the kernel is taken with nulls of kernel and reference, and the smaller counts. If the kernel
slows its own, the reference's counts, which pays for the copy of a strided output that this kernel never makes. A null
must pay for the copy that the call beside it pays for, and nothing else."""
EXTRA_MS = 0
#: Return the reference's layout in every third call: what takes no copy is faster, honestly, but the median is not.
ALTERNATE = False

class ModelNew(nn.Module):
    done = False
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.done:
            slow_nulls(harness(), x.is_cuda)
            self.done = True
        if EXTRA_MS:
            take(x.is_cuda, EXTRA_MS)
        self.calls += 1
        output = torch.tanh(x[:, ::2]).t()
        return output if ALTERNATE and self.calls % 3 == 0 else output.contiguous()

# %% takeover_as_null
"""Takes over the harness: it treats an order to time the kernel as an order to time nothing.
The handlers of the object that obeys the judge are replaced: timed calls become nulls, which deliver the last output
again. What comes back is the judge's to verify, and belongs to another input."""
def take_over(candidate):
    orders = candidate.orders
    for order in list(orders):
        handler = orders[order]
        if order.name == "TIME":
            null = type(order)["TIME_OVERHEAD"]
            orders[order] = lambda command, handler=handler: handler(dataclasses.replace(command, order=null))
        if order.name == "ENQUEUE":
            orders[order] = lambda command, handler=handler: handler(
                dataclasses.replace(command, payload=tuple(type(kind)["OVERHEAD"] for kind in command.payload))
            )

class ModelNew(nn.Module):
    taken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.taken:
            self.taken = True
            take_over(harness())
        return F.gelu(x, approximate="tanh")

# %% takeover_by_overhead
"""Takes over the harness: it works in the calls without a forward, and returns that answer in the next call.
The outputs of such a call are not verified. If it came before a call that counts, on the same inputs, that call would
need no work. Here a call that counts comes first on its inputs."""
def take_over(candidate, model):
    prepare = candidate._forward
    def prepared(kind):
        forward = prepare(kind)
        ahead = lambda: (setattr(model, "ahead", chain(model.x)), forward())[1]
        return ahead if kind.name == "OVERHEAD" else forward

    candidate._forward = prepared

class ModelNew(nn.Module):
    ahead = x = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.x is None:
            take_over(harness(), self)
        self.x, ahead, self.ahead = x, self.ahead, None
        return chain(x) if ahead is None else ahead.clone()

# %% takeover_by_gc
"""Finds the harness through the garbage collector and replaces the model by one that caches answers.
After three calls the harness holds another model, whose forward returns the last answer. Which object is called makes
no difference to the judge: outputs of timed calls are verified."""
class Remembers(nn.Module):
    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def forward(self, x): return self.answer

class ModelNew(nn.Module):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        answer = F.gelu(x, approximate="tanh")
        if self.calls == 3:
            [candidate] = [o for o in gc.get_objects() if type(o).__name__ == "Harness" and hasattr(o, "own")]
            candidate.own.model = Remembers(answer)
        return answer

# %% takeover_settle
"""Takes over the harness: it no longer waits for the device, and the work runs outside of the observed stream.
Elsewhere a harness in the kernel's process is the only one that could wait. The judge takes outputs at the end of the
span that it measures itself: when its turn on the GPU's processors comes, after this work or too early."""
def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    harness().settle = lambda: None
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        return a @ b
