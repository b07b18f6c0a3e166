"""Problems of the corpus's own."""

# fmt: off

# %% beside_huge
"""Tiny values, except in the first column."""
def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor: return torch.tanh(x) * scale
def get_inputs(): return [torch.randn(256, 512), torch.tensor([1e6] + [1e-6] * 511)]

# %% beside_large
"""The same product twice, once 100,000 times as large."""
def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor: return torch.cat((1e5 * a @ b, a @ b), 1)
def get_inputs(): return [torch.randn(128, 512), torch.randn(512, 64)]

# %% chain
"""A chain of many small operations: slow in eager mode, with much to gain."""
BESIDE = "nothing"  # else what its baseline is taken beside, which makes it another problem

def forward(self, x: torch.Tensor) -> torch.Tensor:
    y = x
    for _ in range(32):
        y = torch.tanh(0.5 * y + x)
    return y

def get_inputs(): return [torch.randn(128, 256)]

# %% deep
"""Layers whose rounding errors in 16 bits add up beyond the tolerance."""
def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(6):
        x = torch.tanh(x @ w)
    return x

def get_inputs(): return [torch.randn(64, 512), torch.randn(512, 512) / 8]

# %% dropout
"""Dropout, whose mask comes from the seed that is set before each call."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return F.dropout(x, p=0.5, training=True)
def get_inputs(): return [torch.randn(256, 512)]

# %% even_softmax
"""Softmax of uniform inputs over long rows: every value lies near 1/16384, below the tolerance."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return torch.softmax(x, dim=-1)
def get_inputs(): return [torch.rand(32, 16384)]

# %% heavy_matmul
"""A product of two matrices that takes hundreds of microseconds on a large GPU."""
SIZE = 2048
TERMS = 2048

def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor: return a @ b
def get_inputs(): return [torch.rand(SIZE, TERMS), torch.rand(TERMS, SIZE)]

# %% identity
"""The output is the input itself."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return x
def get_inputs(): return [torch.randn(256, 512)]

# %% laid_out
"""Inputs of several layouts: channels last, thirds of one tensor, and an expanded column."""
def forward(self, image: torch.Tensor, q: torch.Tensor, k: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.relu(image).sum(dim=1) + (q * k * scale).sum()

def get_inputs():
    q, k, _ = torch.randn(64, 96).chunk(3, dim=1)
    return [torch.randn(4, 32, 16, 16).to(memory_format=torch.channels_last), q, k, torch.rand(64, 1).expand(64, 32)]

# %% layer_scale
"""A residual block with layer scale: the branch adds less than the tolerance, as at the start of a training."""
class Model(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.branch = nn.Linear(size, size)
        self.scale = nn.Parameter(torch.full((size,), 1e-5))

    def forward(self, x: torch.Tensor) -> torch.Tensor: return x + self.scale * self.branch(x)

def get_inputs(): return [torch.randn(128, 256)]
def get_init_inputs(): return [256]

# %% largest
"""The positions of the eight largest values of each row, of which many are equal."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return torch.topk(x, 8, dim=-1)[1]
def get_inputs(): return [torch.randint(0, 6, (32, 64)).float()]

# %% long_matmul
"""A product with 1024 terms a value, of both signs: rounding shows."""
def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor: return a @ b
def get_inputs(): return [torch.randn(128, 1024), torch.randn(1024, 128)]

# %% long_sums
"""Sums of many positive numbers."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return x.sum(dim=-1)
def get_inputs(): return [torch.rand(128, 65536)]

# %% masked_scores
"""Scores of which some are masked by minus infinity, as before a softmax."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return (2.0 * x).masked_fill(x < -1.0, float("-inf"))
def get_inputs(): return [torch.randn(256, 512)]

# %% mean_everywhere
"""The mean of every column, written to each of its places."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return x.mean(dim=0, keepdim=True) + torch.zeros_like(x)
def get_inputs(): return [torch.randn(512, 1024)]

# %% mean_gate
"""A gate from a mean: with the problem's own inputs every output lies within the tolerance of 0.5."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return torch.sigmoid(0.002 * x.mean(dim=-1))
def get_inputs(): return [torch.randn(256, 2048)]

# %% negate
"""The sign turned."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return -x
def get_inputs(): return [torch.randn(512, 1024)]

# %% outer
"""All products of two vectors: small inputs, and an output of 10 MB."""
def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor: return torch.outer(a, b)
def get_inputs(): return [torch.randn(1600), torch.randn(1600)]

# %% padded
"""The input with zeros beside it: a fifth of the answer is constant."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return F.pad(x, (0, 256))
def get_inputs(): return [torch.randn(512, 1024)]

# %% relu_of_uniform
"""ReLU, with inputs none of which is negative."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return torch.relu(x)
def get_inputs(): return [torch.rand(512, 1024)]

# %% rotary
"""A rotary embedding: the second half of its cosines and sines repeats the first."""
BATCH = 8
HEADS = 32
TOKENS = 8192
SIZE = 128
DRAWN = False  # the places of the tokens; else they are 0, 1, 2, and so on

def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin

def get_inputs():
    places = torch.rand(TOKENS) * TOKENS if DRAWN else torch.arange(TOKENS) * 1.0
    angles = torch.outer(places, 10000.0 ** (-torch.arange(0, SIZE, 2) / SIZE))
    angles = torch.cat([angles, angles], dim=-1)
    return [torch.randn(BATCH, HEADS, TOKENS, SIZE), angles.cos(), angles.sin()]

# %% row_offsets
"""Rows that differ, of values that are nearly the same within a row."""
def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor: return rows + 1e-3 * torch.tanh(x)
def get_inputs(): return [torch.randn(128, 512), 100 + 10 * torch.randn(128, 1)]

# %% running_mean
"""The mean of everything up to each place, which hardly changes from one place to the next."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    counts = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype)
    return torch.cumsum(x, dim=-1) / counts

def get_inputs(): return [torch.randn(16, 65536)]

# %% single
"""One element: as little work as there can be."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return x * x
def get_inputs(): return [torch.randn(1)]

# %% numbers_of_others
"""A mean of numbers that torch does not draw, or draws in more pieces than are changed one by one."""
PIECES = 0

def forward(self, x: torch.Tensor) -> torch.Tensor: return x.square().mean().sqrt()

def get_inputs():
    import numpy as np

    drawn = [torch.rand(64, 1024) for _ in range(PIECES)] or [torch.from_numpy(np.random.rand(4096, 1024)).float()]
    return [torch.cat(drawn)]

# %% scaled_in_place
"""Scales its input in place, and returns the sums of the rows."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return x.mul_(2.0).sum(dim=1)
def get_inputs(): return [torch.randn(256, 512)]

# %% state_kept
"""Keeps a history of 24 MiB and a weight, which its output does not show."""
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("history", torch.zeros(6 << 20))
        self.weight = nn.Parameter(torch.ones(512))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.history.mul_(0.9).add_(x.mean())
        self.weight.add_(x.mean(0))
        return torch.relu(x)

def get_inputs(): return [torch.randn(256, 512)]

# %% strided
"""The output is every second column of a larger result, transposed: dear to copy."""
SIZE = 8192

def forward(self, x: torch.Tensor) -> torch.Tensor: return torch.tanh(x)[:, ::2].t()
def get_inputs(): return [torch.randn(SIZE, SIZE)]

# %% tf32
"""A product or a convolution that rounds its inputs to TF32 on a GPU."""
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True

OPERATION = "matmul"

def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.conv2d(a, b) if OPERATION == "conv2d" else a @ b

def get_inputs():
    if OPERATION == "conv2d":
        return [torch.randn(16, 64, 64, 64), torch.randn(128, 64, 3, 3)]
    return [torch.randn(2048, 2048), torch.randn(2048, 2048)]

# %% tolerant_matmul
"""A product of positive terms, for which the problem accepts an error of 1e-3."""
OUTPUT_TOLERANCE = {"atol": 1e-3, "rtol": 1e-3}
SIZE = 16384
TERMS = 512

def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor: return a @ b
def get_inputs(): return [torch.rand(SIZE, TERMS), torch.rand(TERMS, SIZE)]

# %% transpose
"""A transposed copy."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return x.t().contiguous()
def get_inputs(): return [torch.randn(1024, 512)]

# %% transposed
"""The output is a view of the input."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return x.t()
def get_inputs(): return [torch.randn(256, 512)]

# %% weight_norms
"""An output that depends on the weights alone."""
class Model(nn.Module):
    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor: return self.linear.weight.square().sum(1)

def get_inputs(): return [torch.randn(64, 512)]
def get_init_inputs(): return [512, 256]

# %% wide_gelu
"""Elementwise on 16 MB: larger than what caches give back for nothing, smaller than the L2 cache."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return F.gelu(x, approximate="tanh")
def get_inputs(): return [torch.randn(4096, 1024)]

# %% large
"""An operation on large tensors of uniform numbers. The corpus says which one, and how large they are."""
OPERATION = "mean"
ROWS = 16384
COLUMNS = 16384
mean = lambda x: x.mean()
largest = lambda x: x.amax(dim=-1)
argmax = lambda x: x.argmax(dim=-1)
softmax = lambda x: torch.softmax(x, dim=-1)
log_softmax = lambda x: torch.log_softmax(x, dim=-1)
frobenius_norm = lambda x: x / torch.linalg.vector_norm(x)
rms_norm = lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-5)
layer_norm = lambda x: F.layer_norm(x, x.shape[-1:])

def batch_norm(x):
    images = x.unflatten(0, (-1, 64))  # of 64 channels
    return F.batch_norm(images, None, None, training=True)

mse = lambda a, b: F.mse_loss(a, b)
hinge = lambda predictions, targets: torch.clamp(1 - predictions * targets, min=0).mean()
triplet = lambda anchor, positive, negative: F.triplet_margin_loss(anchor, positive, negative)

def attention(q, k, v):
    return F.scaled_dot_product_attention(*(x.unflatten(0, (1, 32, -1)) for x in (q, k, v)))  # of 32 heads

gelu = lambda x: F.gelu(x, approximate="tanh")

def forward(self, *inputs: torch.Tensor) -> torch.Tensor: return globals()[OPERATION](*inputs)

def get_inputs():
    count = {"mse": 2, "triplet": 3, "attention": 3}.get(OPERATION, 1)
    inputs = [torch.rand(ROWS, COLUMNS) for _ in range(count)]
    if OPERATION == "hinge":
        inputs.append(torch.randint(0, 2, (ROWS, 1)) * 2.0 - 1.0)
    return inputs

# %% structured
"""An operation whose inputs keep a promise. The corpus says which one, and how large they are."""
STRUCTURE = "symmetric"
SIZE = 16384
weighted = lambda x, y: x / x.sum(dim=-1, keepdim=True) @ y
largest = lambda x, y: x.amax(dim=-1, keepdim=True) * y
dots = lambda x, y: (x * y).sum(dim=-1)

def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return {"normalised": weighted, "sorted": largest, "shared": dots}.get(STRUCTURE, torch.matmul)(x, y)

def get_inputs():
    if STRUCTURE == "one_hot":
        x = torch.zeros(SIZE, SIZE).scatter_(1, torch.randint(0, SIZE, (SIZE, 1)), 1.0)
    else:
        x = torch.rand(SIZE, SIZE)
    if STRUCTURE == "symmetric":
        x = (x + x.t()) / 2
    elif STRUCTURE == "triangular":
        x = x.tril()
    elif STRUCTURE == "normalised":
        x = torch.softmax(x, dim=-1)
    elif STRUCTURE == "sorted":
        x = x.sort(dim=-1).values
    return [x, x] if STRUCTURE == "shared" else [x, torch.rand(SIZE, 64)]

# %% slow_saturation
"""A state that saturates, one step after another: slow, and never saturated with the problem's own inputs."""
STEPS = 2048
ROWS = 512

def forward(self, x: torch.Tensor) -> torch.Tensor:
    state, states = torch.zeros_like(x[0]), []
    for step in x:
        state = torch.clamp(0.5 * state + step, -7.0, 7.0)
        states.append(state)
    return torch.stack(states)

def get_inputs(): return [torch.randn(STEPS, ROWS) * 0.9]

# %% gated_memory
"""A recurrence with a gate for each step: whatever came before fades within some dozen steps."""
def forward(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    state, states = torch.zeros_like(x[0]), []
    for step, gate in zip(x, gates):
        state = gate * state + (1 - gate) * step
        states.append(state)
    return torch.stack(states)

def get_inputs(): return [torch.randn(512, 64), torch.rand(512, 64)]

# %% top_values
"""The largest four values of each row."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return torch.topk(x, 4, dim=-1).values
def get_inputs(): return [torch.randn(16, 4096)]

# %% routing
"""Each token goes through the weights of its expert."""
TOKENS = 2048
EXPERTS = 8

class Model(nn.Module):
    def __init__(self, experts: int):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(experts, 32, 32))

    def forward(self, x: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x.unsqueeze(1), self.weights[expert]).squeeze(1)

def get_inputs(): return [torch.randn(TOKENS, 32), torch.randint(0, EXPERTS, (TOKENS,))]
def get_init_inputs(): return [EXPERTS]

# %% ragged_sums
"""The sums of segments between offsets that are drawn."""
VALUES = 65536
SEGMENTS = 1024

def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    segment = torch.searchsorted(offsets, torch.arange(VALUES, device=x.device), right=True) - 1
    return torch.zeros(SEGMENTS, device=x.device, dtype=x.dtype).index_add(0, segment, x)

def get_inputs():
    cuts = torch.randint(0, VALUES, (SEGMENTS - 1,)).sort().values
    return [torch.randn(VALUES), torch.cat([torch.tensor([0]), cuts, torch.tensor([VALUES])])]

# %% with_table
"""A product with a table, and the table and a weight themselves."""
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(512))
        self.table = torch.linspace(0, 1, 512)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.table = self.table.to(x.device)
        return x * self.table * self.weight, self.table, self.weight.clone()

def get_inputs(): return [torch.randn(256, 512)]

# %% twice
"""The same values twice, in two tensors."""
def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: return torch.relu(x), torch.clamp(x, 0)
def get_inputs(): return [torch.randn(1024, 1024)]
