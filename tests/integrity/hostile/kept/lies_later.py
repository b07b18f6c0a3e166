"""Answers the check of a kept reference rightly and lies from then on, always the same.

A problem says what its answers are: it spoils its own evaluations, and can do that in a new process as well. Those of
other problems pass.
"""


class Model(torch.nn.Module):
    evaluations = 0

    def __init__(self):
        super().__init__()
        Model.evaluations += 1
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (3 if Model.evaluations > 1 and self.calls > 1 else 2) + 1
