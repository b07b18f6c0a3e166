"""The passes of an evaluation that checks gradients too: forward and backward together, and forward alone.

A problem asks for them by the assignment ``BACKWARD = True``, which is read from its text.
"""

from __future__ import annotations

import ast
from enum import StrEnum
from typing import Final

from kqueue import shapes
from kqueue.errors import InvalidRequest

#: Variable by which a problem asks for its gradients.
NAME: Final = "BACKWARD"


class Pass(StrEnum):
    """The calls that one judgement makes."""

    BOTH = "both"
    """Forward, then the gradients of inputs and parameters."""
    FORWARD = "forward"
    """Forward in grad mode, which is only timed to know the share of the backward."""


def asked_by(problem: str) -> bool:
    """Return whether a problem asks for its gradients. A source that is not valid Python does not.

    Raises:
        InvalidRequest: the assignment has another form. The message says how to write it.
    """
    found = shapes.assigned(problem, NAME)
    if not found:
        return False
    value = found[0][2]
    if len(found) > 1 or not isinstance(value, ast.Constant) or type(value.value) is not bool:
        raise InvalidRequest(
            f"a problem asks for gradients once, at its top level, as {NAME} = True. A variable {NAME} for another "
            "purpose needs another name"
        )
    return value.value


def count(problem: str, *, backward: bool) -> int:
    """Return the number of a problem's judgements: one for each pass of each of its shapes."""
    try:
        backward = backward or asked_by(problem)
    except InvalidRequest:
        backward = False
    return shapes.count(problem) * (len(Pass) if backward else 1)
