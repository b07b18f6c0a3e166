"""Honest kernels of many operations."""

# fmt: off

# %% large
"""Honest: a large operation, in another order than the reference's.
Sums of many million terms are made of other parts. The last digits differ, and whatever is changed in an input
shows."""
OPERATION = "mean"
mean = lambda x: x.sum(dim=0).sum() / x.numel()
largest = lambda x: x.unflatten(-1, (64, -1)).amax(dim=-1).amax(dim=-1)

def argmax(x):
    values, places = x.unflatten(-1, (64, -1)).max(dim=-1)
    chunk = values.argmax(dim=-1, keepdim=True)
    return (chunk * (x.shape[-1] // 64) + places.gather(-1, chunk)).squeeze(-1)

def softmax(x):
    powers = torch.exp(x - x.amax(dim=-1, keepdim=True))
    return powers / powers.unflatten(-1, (64, -1)).sum(dim=-2).sum(dim=-1, keepdim=True)

log_softmax = lambda x: x - torch.logsumexp(x.unflatten(-1, (64, -1)), dim=-1).logsumexp(dim=-1, keepdim=True)
frobenius_norm = lambda x: x * torch.rsqrt(torch.linalg.vector_norm(x, dim=0).square().sum())

def statistics(x, dim):
    """The variance and the mean, by way of the chunks' own."""
    variances, means = torch.var_mean(x.float().unflatten(-1, (64, -1)), dim=-1, correction=0)
    mean = means.mean(dim=dim, keepdim=True)
    return variances.mean(dim=dim, keepdim=True) + (means - mean).square().mean(dim=dim, keepdim=True), mean

def rms_norm(x):
    norms = torch.linalg.vector_norm(x.unflatten(-1, (64, -1)), dim=-1, dtype=torch.float32)
    return (x * torch.rsqrt(norms.square().sum(dim=-1, keepdim=True) / x.shape[-1] + 1e-5)).to(x.dtype)

def layer_norm(x):
    variance, mean = statistics(x, dim=-1)
    return ((x - mean) * torch.rsqrt(variance + 1e-5)).to(x.dtype)

def batch_norm(x):
    x = x.unflatten(0, (-1, 64))
    variance, mean = statistics(x, dim=(0, 2))
    return ((x - mean) * torch.rsqrt(variance + 1e-5)).to(x.dtype)

mse = lambda a, b: (a - b).square().sum(dim=0).sum() / a.numel()
hinge = lambda predictions, targets: torch.relu(1 - predictions * targets).sum(dim=0).sum() / predictions.numel()

def triplet(anchor, positive, negative):
    near = torch.linalg.vector_norm(anchor - positive + 1e-6, dim=-1, dtype=torch.float32)
    far = torch.linalg.vector_norm(anchor - negative + 1e-6, dim=-1, dtype=torch.float32)
    return torch.relu(near - far + 1).mean().to(anchor.dtype)

def attention(q, k, v):
    q, k, v = (x.unflatten(0, (1, 32, -1)) for x in (q, k, v))
    return torch.cat([F.scaled_dot_product_attention(some, k, v) for some in q.chunk(4, dim=-2)], dim=-2)

gelu = lambda x: F.gelu(x, approximate="tanh")

def forward(self, *inputs: torch.Tensor) -> torch.Tensor: return globals()[OPERATION](*inputs)

# %% structured
"""Honest: relies on the structure of its inputs, and so reads less of them.
A half of a symmetric matrix is enough, the zeros of a triangular one are not, the largest of a sorted row is the last,
and two inputs that are one tensor need to be read once. No input that breaks such a promise may be used against it."""
STRUCTURE = "symmetric"
symmetric = lambda x, y: x.triu() @ y + x.triu(1).t() @ y

def triangular(x, y):
    half = x.shape[0] // 2
    return torch.cat([x[:half, :half] @ y[:half], x[half:] @ y])

one_hot = lambda x, y: y[x.argmax(dim=-1)]
normalised = lambda x, y: x @ y
sorted = lambda x, y: x[:, -1:] * y
shared = lambda x, y: x.square().sum(dim=-1)

def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor: return globals()[STRUCTURE](x, y)

# %% rotary
"""Honest: a rotary embedding that reads only the first half of its cosines and sines.
The second half repeats the first in every input that the problem makes, so nobody may change one of them alone."""
def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    first, second, cos, sin = x[..., :half], x[..., half:], cos[:, :half], sin[:, :half]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

# %% in_float64
"""Honest: computes in float64 what the reference computes in fp32, or in TF32.
Where the reference rounds, the two differ, and the kernel is nearer to the exact value. That is no error."""
OPERATION = "matmul"

def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a, b = a.double(), b.double()
    return (F.conv2d(a, b) if OPERATION == "conv2d" else a @ b).float()

# %% structure
"""Honest: another way to compute what the programs that rely on usual inputs compute.
Each is right for any inputs within the problem's range: saturated, skewed or clustered ones."""
OPERATION = "slow_saturation"

def slow_saturation(x):
    states, state = torch.empty_like(x), torch.zeros_like(x[0])
    for step, out in zip(x, states):
        state = torch.addcmul(step, state, torch.full_like(state, 0.5)).clamp_(-7.0, 7.0)
        out.copy_(state)
    return states

def gated_memory(x, gates):
    states, state = torch.empty_like(x), torch.zeros_like(x[0])
    for step, gate, out in zip(x, gates, states):
        state = step + gate * (state - step)
        out.copy_(state)
    return states

top_values = lambda x: x.sort(dim=-1, descending=True).values[:, :4].contiguous()

def ragged_sums(x, offsets):
    sums = torch.cat([x.new_zeros(1, dtype=torch.float64), x.double().cumsum(0)])
    return (sums[offsets[1:]] - sums[offsets[:-1]]).to(x.dtype)

def forward(self, *inputs: torch.Tensor) -> torch.Tensor: return globals()[OPERATION](*inputs)

# %% grouped_experts
"""Honest: sorts the tokens by their expert, and multiplies the tokens of one expert together.
However many tokens an expert gets, all of them are computed."""
class ModelNew(nn.Module):
    def __init__(self, experts: int):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(experts, 32, 32))

    def forward(self, x: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        for number, weight in enumerate(self.weights):
            tokens = (expert == number).nonzero()[:, 0]
            out[tokens] = x[tokens] @ weight
        return out
