"""Answers with a tensor first and with a list later: ``invalid_problem``."""


def forward(self, x):
    self.own = getattr(self, "own", 0) + 1
    return x * 2 + 1 if self.own == 1 else [x * 2 + 1]
