"""Answers with tensors that have no data: ``invalid_problem``."""


def forward(self, x):
    return x.to("meta")
