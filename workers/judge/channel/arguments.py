"""The arguments of a call: tensors in lists, tuples and dicts, beside plain values.

They travel in two parts: their arrangement, in which :data:`LEAF` stands for each tensor, and the tensors in the order
of the leaves. An arrangement is a list of positional arguments or a dict of keyword arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, Final, cast

import torch


class Leaf(Enum):
    """The place of a tensor in an arrangement."""

    TENSOR = "tensor"


LEAF: Final = Leaf.TENSOR
#: What ``get_inputs()`` must return, for messages.
FORM: Final = (
    "get_inputs() must return a list of tensors, numbers, strings, None, and lists, tuples and dicts of them;"
    " or a dict of such keyword arguments"
)
#: Plain values.
_PLAIN: Final = (int, float, bool, str, type(None))
_MOST_DEPTH: Final = 8


class ArgumentsError(ValueError):
    """The values cannot be a call's arguments; the message says why."""


def take_apart(arguments: Any) -> tuple[Any, list[torch.Tensor]]:
    """Return the arrangement of arguments, and the tensors in it.

    Raises:
        ArgumentsError: they hold something else.
    """
    if not isinstance(arguments, (list, tuple, dict)):
        raise ArgumentsError("no list, tuple or dict")
    tensors: list[torch.Tensor] = []
    whole = cast("Any", arguments)
    arrangement = _without_tensors(list(whole) if isinstance(whole, tuple) else whole, 0, tensors)
    check(arrangement)
    return arrangement, tensors


def _without_tensors(value: Any, depth: int, tensors: list[torch.Tensor]) -> Any:
    # No function within another: one that calls itself would keep the tensors alive until garbage is collected.
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        tensors.append(value)
        return LEAF
    if depth > _MOST_DEPTH:
        raise ArgumentsError("values that are nested too deeply")
    if kind is list or kind is tuple:
        return kind(_without_tensors(item, depth + 1, tensors) for item in value)
    if kind is dict:
        return {key: _without_tensors(item, depth + 1, tensors) for key, item in value.items()}
    return value


def check(arrangement: Any) -> int:
    """Return the number of leaves of an arrangement that may be anything.

    Raises:
        ArgumentsError: it is none.
    """
    if type(arrangement) not in (list, dict):
        raise ArgumentsError(f"a value of the type {type(arrangement).__name__} for all arguments")
    return _leaves(arrangement, 0)


def _leaves(value: Any, depth: int) -> int:
    kind = type(value)
    if value is LEAF:
        return 1
    if depth > _MOST_DEPTH:
        raise ArgumentsError("values that are nested too deeply")
    if kind is list or kind is tuple:
        return sum(_leaves(item, depth + 1) for item in value)
    if kind is dict:
        if not all(type(key) is str for key in value):
            raise ArgumentsError("a dict whose keys are not strings")
        return sum(_leaves(item, depth + 1) for item in value.values())
    if kind not in _PLAIN:
        raise ArgumentsError(f"a value of the type {kind.__name__}")
    return 0


def put_together(arrangement: Any, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and keyword arguments of one call, in lists and dicts of its own."""
    left = iter(tensors)
    made = _with_tensors(arrangement, left)
    return ([], made) if isinstance(made, dict) else (made, {})


def _with_tensors(value: Any, left: Iterator[torch.Tensor]) -> Any:
    if value is LEAF:
        return next(left)
    if isinstance(value, dict):
        return {key: _with_tensors(item, left) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        items = cast("list[Any]", value)
        return type(items)(_with_tensors(item, left) for item in items)
    return value
