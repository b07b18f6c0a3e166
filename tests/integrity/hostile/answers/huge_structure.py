"""Answers with a million tensors in nested lists: ``invalid_problem``."""


class Model(torch.nn.Module):
    calls = 0

    def forward(self, x):
        Model.calls += 1
        return [[x[:1, :1]] * 1000] * 1000
