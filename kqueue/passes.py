"""The passes of an evaluation that checks gradients. A problem asks for them by the assignment ``BACKWARD = True``."""

from __future__ import annotations

import ast
import contextlib
from enum import StrEnum
from typing import Final

from kqueue import shapes
from kqueue.errors import InvalidRequest

#: Variable by which a problem asks for gradients.
NAME: Final = "BACKWARD"


class Pass(StrEnum):
    """The work of each call of one judgement."""

    BOTH = "both"
    """Forward, then the gradients of inputs and parameters."""
    FORWARD = "forward"
    """Forward in grad mode. The time of the backward is the rest of the time of both."""


def asked_by(problem: str) -> bool:
    """Return whether a problem asks for gradients. A source that is not valid Python does not.

    An InvalidRequest for another form of the assignment says how to write it.
    """
    values = [value for _, _, value in shapes.assigned(problem, NAME)]
    match values:
        case []:
            return False
        case [ast.Constant(value=bool(asked))]:
            return asked
        case _:
            raise InvalidRequest(
                f"a problem asks for gradients once, at its top level, as {NAME} = True. A variable {NAME} for another "
                "purpose needs another name"
            )


def count(problem: str, *, backward: bool) -> int:
    """Return the number of a problem's judgements: one for each pass of each shape."""
    with contextlib.suppress(InvalidRequest):
        backward = backward or asked_by(problem)
    return shapes.count(problem) * (len(Pass) if backward else 1)
