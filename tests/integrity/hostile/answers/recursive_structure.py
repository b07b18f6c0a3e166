"""Answers with a list that holds itself: ``reference_error``."""


class Model(torch.nn.Module):
    calls = 0

    def forward(self, x):
        Model.calls += 1
        knot = [x]
        knot.append(knot)
        return knot
