"""Answers otherwise from its second evaluation on, by a number that it keeps on its class.

Its answer to an input of the evaluation before has changed: it is replaced, and the second evaluation passes too.
"""


class Model(torch.nn.Module):
    evaluations = 0

    def __init__(self):
        super().__init__()
        Model.evaluations += 1

    def forward(self, x):
        return x * (2 if Model.evaluations == 1 else 3) + 1
