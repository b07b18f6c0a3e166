"""Patches torch, random, json and os in its first evaluation, to spoil whoever uses them later.

Nobody but itself does: each problem and each kernel has a process of its own. It is replaced as its inputs have changed.
"""


def spoil():
    torch.randn = lambda *shape: torch.full(shape, Model.evaluations * 0.5)
    random.seed = json.loads = lambda *a, **k: None
    os.listdir = lambda *a: ["nothing"]


class Model(torch.nn.Module):
    evaluations = 0

    def __init__(self):
        super().__init__()
        Model.evaluations += 1
        spoil()

    def forward(self, x):
        return x * 2 + 1


def get_inputs():
    return [torch.randn(16, 8) + 0.5 * torch.rand(16, 8)]
