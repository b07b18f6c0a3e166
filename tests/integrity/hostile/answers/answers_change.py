"""Adds the number of the call to its answer: ``invalid_problem``.

Before a kernel is called wrong the reference answers the same input again.
"""


class Model(torch.nn.Module):
    calls = 0

    def forward(self, x):
        Model.calls += 1
        return x * 2 + Model.calls
