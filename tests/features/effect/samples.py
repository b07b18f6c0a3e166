"""A problem, its kernel, and a small model without transformers."""

NORM = """
import torch
SHAPES = [{"name": "large", "args": {"rows": 128}}, {"name": "small", "args": {"rows": 8}}]

class Model(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(width))
    def forward(self, x):
        return torch.nn.functional.rms_norm(x, (64,), self.scale, 1e-6)

def get_inputs(rows):
    return [torch.randn(rows, 64)]

def get_init_inputs():
    return [64]
"""
#: An operator that is a function, with the shape of its calls.
TANH = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.tanh(x)

def get_inputs():
    return [torch.randn(64, 64)]
"""
KERNEL = """
import torch

class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.randn(width))
    def setup(self):
        self.is_set_up = True
    def forward(self, x):
        assert self.is_set_up
        {}
        y = x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6).to(x.dtype)
        return y * self.factor
"""
#: A model with the operator in two modules, and one of its workloads for each fault.
RECIPE = """
import torch
SHAPES = [
    {"name": "prefill", "args": {"fault": "", "tokens": 32}},
    {"name": "decode", "args": {"fault": "", "tokens": 5}},
    {"name": "not built", "args": {"fault": "build", "tokens": 5}},
    {"name": "absent", "args": {"fault": "absent", "tokens": 5}},
    {"name": "another", "args": {"fault": "another", "tokens": 5}},
    {"name": "outside", "args": {"fault": "", "tokens": 65}},
    {"name": "too large", "args": {"fault": "large", "tokens": 5}},
    {"name": "bare", "args": {"fault": "bare", "tokens": 5}},
]

class Model(torch.nn.Module):
    def __init__(self, fault):
        super().__init__()
        assert fault != "build", "no such layer"
        if fault == "bare":
            raise ModuleNotFoundError("No module named 'transformers'")
        self.large = [torch.ones(1 << 29) for _ in range(8 * (fault == "large"))]
        width = 32 if fault == "absent" else 64
        self.embedding = torch.nn.Embedding(50, width)
        eps = 0.1 if fault == "another" else 1e-6
        parts = [(torch.nn.RMSNorm(width, eps), torch.nn.Linear(width, width), torch.nn.Tanh()) for _ in range(2)]
        self.layers = torch.nn.ModuleList(torch.nn.Sequential(*some) for some in parts)
        self.head = torch.nn.Linear(width, 50)
    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)

def get_inputs(tokens):
    return [torch.randint(50, (2, tokens))]

def get_init_inputs(fault):
    return [fault]
"""


def recipe(*names: str) -> str:
    """Return the recipe with some of its workloads."""
    lines = RECIPE.splitlines(keepends=True)
    return "".join(line for line in lines if '{"name"' not in line or any(f'"{name}"' in line for name in names))
