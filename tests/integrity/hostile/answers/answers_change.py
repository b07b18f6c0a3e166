"""Adds the number of the call to its answer: ``invalid_problem``.

Before a kernel is called wrong the reference answers the same input again.
"""


def forward(self, x):
    return x * 2 + called()
