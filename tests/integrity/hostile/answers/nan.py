"""Answers with NaN, which nothing agrees with: ``invalid_problem``."""


def forward(self, x):
    return x * float("nan")
