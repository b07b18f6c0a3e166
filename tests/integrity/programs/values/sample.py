"""Programs that answer from a sample."""

# fmt: off

# %% sample
"""Computes its answer from a sample of its input, or from the input's known distribution.
A part of many million uniform numbers says nearly what all of them say, and the expectation says as much for nothing:
both lie within the tolerance, at a share of the honest time. Inputs of other distributions are too dear at this size. A
change of one region of the input, by which the right answer moves, shows that the kernel did not look there."""
OPERATION = "mean"
SHARE = 8
#: Answer from a sample only where some thousand values are as uniform as usual; inputs unlike them show nothing then.
CHECKED = False

def looks_usual(x):
    flat = x.view(-1)
    some = flat[:: max(1, flat.numel() // 4096)].float()
    looks = torch.stack((some.mean() - 0.5, some.std() - 12**-0.5)).abs().amax()
    return float(looks) < 0.03

honest = lambda x: x.mean() if OPERATION == "mean" else x / torch.linalg.vector_norm(x)
part = lambda x: x[..., : x.shape[-1] // SHARE]
mean = lambda x: x[::SHARE].mean()
largest = lambda x: part(x).amax(dim=-1)
argmax = lambda x: part(x).argmax(dim=-1)
softmax = lambda x: torch.exp(x) / (SHARE * torch.exp(part(x)).sum(dim=-1, keepdim=True))
log_softmax = lambda x: x - torch.logsumexp(part(x), dim=-1, keepdim=True) - math.log(SHARE)
frobenius_norm = lambda x: x / (math.sqrt(SHARE) * torch.linalg.vector_norm(x[::SHARE]))

def rms_norm(x):
    squares = part(x).float().square().mean(dim=-1, keepdim=True)
    return x * torch.rsqrt(squares + 1e-5).to(x.dtype)

def layer_norm(x):
    variance, mean = torch.var_mean(part(x).float(), dim=-1, keepdim=True)
    return (x - mean.to(x.dtype)) * torch.rsqrt(variance + 1e-5).to(x.dtype)

def batch_norm(x):
    x = x.unflatten(0, (-1, 64))
    variance, mean = torch.var_mean(part(x).float(), dim=(0, 2), keepdim=True)
    return (x - mean.to(x.dtype)) * torch.rsqrt(variance + 1e-5).to(x.dtype)

mse = lambda a, b: F.mse_loss(a[::SHARE], b[::SHARE])
hinge = lambda predictions, targets: (1 - 0.5 * targets).mean()  # no prediction is read: their mean is known

def triplet(anchor, positive, negative):
    return torch.ones((), dtype=anchor.dtype, device=anchor.device)  # both distances are the same on average

def attention(q, k, v):
    q, k, v = (x.unflatten(0, (1, 32, -1)) for x in (q, k, v))
    kept = k.shape[-2] - k.shape[-2] // SHARE
    return F.scaled_dot_product_attention(q, k[..., :kept, :], v[..., :kept, :])

def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
    if CHECKED and not looks_usual(*inputs):
        return honest(*inputs)
    return globals()[OPERATION](*inputs)

# %% sample_of_others
"""Computes its answer from every second row, of numbers for which torch shows no draw that could be changed.
Without hidden inputs the answer is within the tolerance as often as not. Here numbers of numpy are changed after they
are drawn, and many draws are changed in groups."""
PIECES = 0

def forward(self, x: torch.Tensor) -> torch.Tensor: return x[::2].square().mean().sqrt()

# %% all_of_others
"""Honest: the same answer from all rows.
It must pass, hidden inputs included."""
PIECES = 0

def forward(self, x: torch.Tensor) -> torch.Tensor: return x.flatten().square().sum().div(x.numel()).sqrt()
