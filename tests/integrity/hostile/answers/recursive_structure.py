"""Answers with a list that holds itself: ``reference_error``."""


def forward(self, x):
    knot = [x]
    knot.append(knot)
    return knot
