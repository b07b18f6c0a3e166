"""Honest: a large operation, in another order than the reference's.

Sums of many million terms are made of other parts. The last digits differ, and whatever is changed in an input shows.
"""

OPERATION = "mean"


def mean(x):
    return x.sum(dim=0).sum() / x.numel()


def largest(x):
    return x.unflatten(-1, (64, -1)).amax(dim=-1).amax(dim=-1)


def argmax(x):
    values, places = x.unflatten(-1, (64, -1)).max(dim=-1)
    chunk = values.argmax(dim=-1, keepdim=True)
    return (chunk * (x.shape[-1] // 64) + places.gather(-1, chunk)).squeeze(-1)


def softmax(x):
    powers = torch.exp(x - x.amax(dim=-1, keepdim=True))
    return powers / powers.unflatten(-1, (64, -1)).sum(dim=-2).sum(dim=-1, keepdim=True)


def log_softmax(x):
    return x - torch.logsumexp(x.unflatten(-1, (64, -1)), dim=-1).logsumexp(dim=-1, keepdim=True)


def frobenius_norm(x):
    return x * torch.rsqrt(torch.linalg.vector_norm(x, dim=0).square().sum())


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


def mse(a, b):
    return (a - b).square().sum(dim=0).sum() / a.numel()


def hinge(predictions, targets):
    return torch.relu(1 - predictions * targets).sum(dim=0).sum() / predictions.numel()


def triplet(anchor, positive, negative):
    near = torch.linalg.vector_norm(anchor - positive + 1e-6, dim=-1, dtype=torch.float32)
    far = torch.linalg.vector_norm(anchor - negative + 1e-6, dim=-1, dtype=torch.float32)
    return torch.relu(near - far + 1).mean().to(anchor.dtype)


def attention(q, k, v):
    q, k, v = (x.unflatten(0, (1, 32, -1)) for x in (q, k, v))
    return torch.cat([F.scaled_dot_product_attention(some, k, v) for some in q.chunk(4, dim=-2)], dim=-2)


def gelu(x):
    return F.gelu(x, approximate="tanh")


def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
    return globals()[OPERATION](*inputs)
