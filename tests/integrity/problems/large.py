"""An operation on large tensors of uniform numbers. The corpus says which one, and how large they are."""

OPERATION = "mean"
ROWS = 16384
COLUMNS = 16384


def mean(x):
    return x.mean()


def largest(x):
    return x.amax(dim=-1)


def argmax(x):
    return x.argmax(dim=-1)


def softmax(x):
    return torch.softmax(x, dim=-1)


def log_softmax(x):
    return torch.log_softmax(x, dim=-1)


def frobenius_norm(x):
    return x / torch.linalg.vector_norm(x)


def rms_norm(x):
    return F.rms_norm(x, x.shape[-1:], eps=1e-5)


def layer_norm(x):
    return F.layer_norm(x, x.shape[-1:])


def batch_norm(x):
    images = x.unflatten(0, (-1, 64))  # of 64 channels
    return F.batch_norm(images, None, None, training=True)


def mse(a, b):
    return F.mse_loss(a, b)


def hinge(predictions, targets):
    return torch.clamp(1 - predictions * targets, min=0).mean()


def triplet(anchor, positive, negative):
    return F.triplet_margin_loss(anchor, positive, negative)


def attention(q, k, v):
    return F.scaled_dot_product_attention(*(x.unflatten(0, (1, 32, -1)) for x in (q, k, v)))  # of 32 heads


def gelu(x):
    return F.gelu(x, approximate="tanh")


def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
    return globals()[OPERATION](*inputs)


def get_inputs():
    count = {"mse": 2, "triplet": 3, "attention": 3}.get(OPERATION, 1)
    inputs = [torch.rand(ROWS, COLUMNS) for _ in range(count)]
    if OPERATION == "hinge":
        inputs.append(torch.randint(0, 2, (ROWS, 1)) * 2.0 - 1.0)
    return inputs
