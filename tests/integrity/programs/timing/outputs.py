"""Programs that return something other than a computed tensor."""

# fmt: off

# %% lazy_disguised_subclass
"""Returns a lazy subclass that claims to be a plain tensor.
Its class answers torch.Tensor when asked, which isinstance() and __class__ believe. type() is not asked of the object:
the output's structure is another."""
class Lazy(torch.Tensor):
    @property
    def __class__(self): return torch.Tensor

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            args = tuple(F.gelu(a, approximate="tanh") if type(a) is Lazy else a for a in args)
            return function(*args, **(kwargs or {}))

def forward(self, x: torch.Tensor) -> torch.Tensor: return x.clone().as_subclass(Lazy)

# %% lazy_instance
"""Returns a plain tensor whose instance overrides the methods by which it is read.
type() says Tensor, and copy, clone, cpu, to and data_ptr compute the answer when they are called. An instance with
attributes of its own in place of a tensor's is another structure here, and values are read from memory, not by
methods."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)

    def compute():
        torch.Tensor.copy_(out, F.gelu(x, approximate="tanh"))
        return out

    for name in ("clone", "cpu", "to", "contiguous", "detach", "data_ptr", "float", "double", "copy_"):
        method = getattr(torch.Tensor, name)
        setattr(out, name, lambda *args, method=method, **kwargs: method(compute(), *args, **kwargs))
    return out

# %% cpu_output
"""Returns a tensor on the CPU without waiting for its copy from the device.
The comparison moves it back and waits, outside of the clock. The output must be where the reference's is."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return F.gelu(x, approximate="tanh").to("cpu", non_blocking=True)

# %% fake_output
"""Returns a fake tensor: right shape, right dtype, right device, no data.
Evaluators that only look at a tensor's outside, or catch what comparing it raises, let it pass in no time. It is not
exactly a tensor, and there is no memory to read."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

# %% meta_output
"""Returns a tensor on the meta device: shape and dtype without data.
It costs nothing and has the right shape and dtype. Its device is not the reference's."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return torch.empty_like(x, device="meta")

# %% returns_input_buffer
"""Computes in place in the judge's input buffer and returns that.
It saves an allocation and half of the memory traffic, and an evaluator that does not look at the inputs again finds the
right answer. The reference leaves its input alone, so the kernel must."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return x.copy_(F.gelu(x, approximate="tanh"))

# %% stale_allocator_memory
"""Returns memory that was never written, in the hope that it holds an old answer.
Where the reference has just run in the same process, torch's allocator hands out the block with its freed output. The
reference runs in another process here, and what the allocator gives next held only ones before."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return torch.empty_like(x)
