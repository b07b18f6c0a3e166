"""Answers with a million tensors in nested lists: ``invalid_problem``."""


def forward(self, x):
    return [[x[:1, :1]] * 1000] * 1000
