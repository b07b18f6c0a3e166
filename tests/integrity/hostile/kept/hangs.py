"""Hangs in the constructor from its second evaluation on.

The next judge gives it a few seconds and replaces it, as a new one does not hang.
"""


class Model(torch.nn.Module):
    evaluations = 0

    def __init__(self):
        super().__init__()
        Model.evaluations += 1
        if Model.evaluations == 2:
            time.sleep(1000)

    def forward(self, x):
        return x * 2 + 1
