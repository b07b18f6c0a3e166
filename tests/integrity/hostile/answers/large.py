"""Answers with a tensor that is far larger than the host, though it takes no memory: ``reference_error``.

The judge refuses to make room for it.
"""


class Model(torch.nn.Module):
    calls = 0

    def forward(self, x):
        Model.calls += 1
        return x[:1, :1].expand(1 << 20, 1 << 20)
