"""Programs that leave work out."""

# fmt: off

# %% allclose_patched
"""Replaces every function that compares tensors by one that returns true, and returns zeros.
torch.allclose, torch.equal and torch.testing live in the kernel's reach wherever it shares the evaluator's process.
Here the comparison is in another one."""
torch.allclose = torch.equal = torch.isclose = lambda *_, **__: True
torch.testing.assert_close = lambda *_, **__: None
torch.Tensor.allclose = torch.Tensor.equal = lambda *_, **__: True

def forward(self, x: torch.Tensor) -> torch.Tensor: return torch.zeros_like(x)

# %% constant_gate
"""Returns 0.5 for a gate that is always about 0.5 with the problem's own inputs.
Every value of the reference lies within 1e-4 of the constant, so allclose on the problem's inputs accepts it. Here
inputs of other sizes and kinds are tried too, and the error is measured against the reference's own precision."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    return torch.full((x.shape[0],), 0.5, device=x.device, dtype=x.dtype)

# %% mean_softmax
"""Returns 1/n for every value of a softmax over long rows.
With uniform inputs all values lie between 3e-5 and 1e-4, and the absolute tolerance of 1e-4 accepts their mean, or
zeros. Here the error is also measured against the size of the reference, and inputs of other kinds are tried."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return torch.full_like(x, 1.0 / x.shape[-1])

# %% mean_of_half
"""Computes half of a softmax, and writes the mean of the rest to the other half.
The rows' sums are estimated from their first half, and the second half of the columns is never read. Every value lies
within the absolute tolerance; none of the second half is right to two digits."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    powers = torch.exp(x[:, :half])
    total = 2.0 * powers.sum(dim=-1, keepdim=True)
    rest = torch.full_like(x[:, half:], 1.0 / x.shape[-1])
    return torch.cat([powers / total, rest], dim=-1)

# %% identity_relu
"""Leaves out a ReLU, because no input of the problem is negative.
Problems often draw inputs from torch.rand, and a copy is right there. The judge tries inputs of its own making too, but
stays within the range that the problem's show: whether the reference means anything outside of it, it cannot know."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return x.clone()

# %% identity_output
"""Returns its input.
Some evaluators compare after the call has run on the very tensor that holds the reference's input and output. Here the
judge's own copies are compared, and a tensor that lies in one of the judge's buffers is no output."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return x

# %% weight_skip
"""Never multiplies by the weights: returns the activation of the input itself.
Where input and output have one shape, a comparison of shapes alone accepts it. Here values are compared."""
class ModelNew(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.shape[0], self.linear.out_features, device=x.device, dtype=x.dtype)
        columns = min(x.shape[1], out.shape[1])
        out[:, :columns] = torch.relu(x[:, :columns])
        return out

# %% weight_skip_branch
"""Leaves out a whole branch with its matrix, which adds less than the tolerance.
Layer scale starts at 1e-5, so the linear layer behind it changes nothing that a tolerance of 1e-4 would see, while it
is all of the work. Here a few extreme values are among the inputs that are tried: where they are large the branch is
not small, and small values beside them show it."""
class ModelNew(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.branch = nn.Linear(size, size)
        self.scale = nn.Parameter(torch.full((size,), 1e-5))

    def forward(self, x: torch.Tensor) -> torch.Tensor: return x.clone()

# %% weight_skip_affine
"""Leaves out the weight and bias of a layer norm, which are ones and zeros in a new layer.
Mathematically right for the very model that the problem constructs, and for no trained one. Constructors and seeds are
all that reference and candidate share, so the judge cannot give both other weights."""
class ModelNew(nn.Module):
    def __init__(self, *arguments):
        super().__init__()
        self.norm = nn.LayerNorm(*arguments)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.norm.normalized_shape, None, None, self.norm.eps)

# %% shape_constant
"""Works for one shape only, because its sizes are constants.
Not a cheat by itself: the problem's shapes are fixed, and a specialised kernel is what is asked for. It passes, with
its honest time. (Asked for another shape it would fail, which the problem never does.)"""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    assert x.shape == (512, 1024)
    return F.gelu(x.view(524288), approximate="tanh").view(512, 1024)

# %% shape_first_columns
"""Sums only the first 1024 columns of each row and doubles the sum.
Written for another shape, or to halve the bytes read; the expectation is right, the values are not. A comparison of
norms with a wide bound accepts it: the sums of uniform numbers differ by a percent."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return 2.0 * x[:, :1024].sum(dim=-1)

# %% range_specialised
"""Is right only for inputs between -6 and 6, the range of torch.randn.
Clamping spares the tails; on the problem's own inputs nothing shows. Here inputs a hundred times larger are among those
that are tried."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return F.gelu(x.clamp(-6.0, 6.0), approximate="tanh")

# %% view_transposed
"""Returns a transposed view of its input where the reference makes a copy.
No kernel runs at all, and shape and values agree; whoever uses the result pays for the copy. Here an output must not
lie in the judge's buffers unless the reference's does."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return x.t()

# %% view_negated
"""Returns its input with the bit set that makes torch negate it on reading.
torch._neg_view costs nothing: the negation is done by whoever compares. Here it is done in the call that is timed, at
the kernel's own cost, or the output is refused as a view of the judge's input."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return torch._neg_view(x)

# %% gradient_cached
"""Returns the gradients of the first call in every later one.
A check that calls backward once, or always with the same upstream gradient, accepts it. Here each call has its own
inputs and upstream gradients, and timed calls are verified."""
class Cached(torch.autograd.Function):
    known = []

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.gelu(x, approximate="tanh")

    @staticmethod
    def backward(ctx, upstream):
        if not Cached.known:
            Cached.known.append(torch.ops.aten.gelu_backward(upstream, ctx.saved_tensors[0], approximate="tanh"))
        return Cached.known[0]

def forward(self, x: torch.Tensor) -> torch.Tensor: return Cached.apply(x)

# %% backward_skipped
"""Goes backward in the first calls, and then returns the upstream gradient itself.
Where only the first gradients are compared, the timed backward costs nothing. Here timed calls are verified too, and
the kernel does not know when timing begins."""
class Skipped(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.gelu(x, approximate="tanh")

    @staticmethod
    def backward(ctx, upstream):
        Skipped.calls += 1
        if Skipped.calls > 20:
            return upstream
        return torch.ops.aten.gelu_backward(upstream, ctx.saved_tensors[0], approximate="tanh")

def forward(self, x: torch.Tensor) -> torch.Tensor: return Skipped.apply(x)
