"""The arguments of a call: tensors and plain values in lists, tuples and dicts.

They are sent in two parts. The arrangement is a list of positional arguments or a dict of keyword arguments, with
:data:`LEAF` in place of each tensor. The tensors follow in the order of the leaves.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, Final, cast

import torch

from workers.judge.channel.objects import Built, Named, as_data, as_object


class Leaf(Enum):
    """The marker of a tensor in an arrangement."""

    TENSOR = "tensor"


LEAF: Final = Leaf.TENSOR
#: Form that ``get_inputs()`` must return, for messages.
FORM: Final = (
    "get_inputs() must return a list of tensors, numbers, strings, None, dtypes, functions and modules of torch, and"
    " lists, tuples and dicts of them, or a dict of such keyword arguments"
)
#: Form of ``get_inputs()`` from call to call, with the remedy, for messages.
STEADY: Final = (
    "get_inputs() must return the same shapes, layouts, dtypes and scalars each time: draw values only, return numbers"
    " that follow from drawn values as tensors, and name several sizes by SHAPES"
)
#: Types of plain values.
_PLAIN: Final = (int, float, bool, complex, str, torch.dtype, type(None))
_MOST_DEPTH: Final = 8


class ArgumentsError(ValueError):
    """Raised where values cannot be a call's arguments. The message gives the reason."""


def take_apart(arguments: Any) -> tuple[Any, list[torch.Tensor]]:
    """Split arguments into their arrangement and their tensors. Raise ArgumentsError for an unsupported value."""
    if not isinstance(arguments, (list, tuple, dict)):
        raise ArgumentsError("no list, tuple or dict")
    tensors: list[torch.Tensor] = []
    whole = cast("Any", arguments)
    arrangement = _without_tensors(list(whole) if isinstance(whole, tuple) else whole, 0, tensors)
    check(arrangement)
    return arrangement, tensors


def _without_tensors(value: Any, depth: int, tensors: list[torch.Tensor]) -> Any:
    # Not a nested function: a recursive closure is a reference cycle, and would keep the tensors alive until garbage
    # collection.
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
    if kind in _PLAIN:
        return value
    try:
        data = as_data(value)
    except ValueError as error:
        raise ArgumentsError(str(error)) from None
    return data if isinstance(data, Named) else Built(data.name, _without_tensors(data.attributes, depth + 1, tensors))


def leaves(arrangement: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield each value in an arrangement with its path, such as ``inputs[0]``. A tensor's value is :data:`LEAF`."""
    if isinstance(arrangement, (list, tuple)):
        for number, item in enumerate(cast("Sequence[Any]", arrangement)):
            yield from leaves(item, f"{path}[{number}]")
    elif isinstance(arrangement, (dict, Built)):
        values = arrangement.attributes if isinstance(arrangement, Built) else cast("dict[str, Any]", arrangement)
        for key, item in values.items():
            yield from leaves(item, f"{path}[{key!r}]")
    else:
        yield path, arrangement


def check(arrangement: Any) -> int:
    """Validate an untrusted arrangement, and return its number of leaves. Raise ArgumentsError if it is not one."""
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
    if kind is Built and type(value.attributes) is dict:
        return _leaves(value.attributes, depth + 1)
    if kind not in _PLAIN and kind is not Named:
        raise ArgumentsError(f"a value of the type {kind.__name__}")
    return 0


def put_together(arrangement: Any, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and keyword arguments of one call, in new lists and dicts.

    The arrangement is a list, a dict, or a tuple of both.
    """
    made = _with_tensors(arrangement, iter(tensors))
    return made if isinstance(made, tuple) else ([], made) if isinstance(made, dict) else (made, {})


def of_constructor(returned: Any, model: Any) -> list[Any] | dict[str, Any] | tuple[list[Any], dict[str, Any]]:
    """Return a model's arguments from the value of ``get_init_inputs()``: a list, a dict, or a tuple of both.

    ``[[arguments], {keywords}]`` is KernelBook's form. It can also be two arguments, so the constructor's signature
    decides. Raise ArgumentsError for any other value.
    """
    if isinstance(returned, dict):
        return dict(cast("dict[str, Any]", returned))
    if not isinstance(returned, (list, tuple)):
        raise ArgumentsError("get_init_inputs() must return a list, a dict of keyword arguments, or [list, dict]")
    arguments = list(cast("list[Any]", returned))
    match arguments:
        case [[*positional], dict() as keywords] if all(isinstance(key, str) for key in cast("Any", keywords)):
            pair = positional, cast("dict[str, Any]", keywords)
            is_clear = bool(keywords) or not positional or not _accepts(model, arguments, {})
            return pair if is_clear and _accepts(model, *pair) else arguments
        case _:
            return arguments


def _accepts(model: Any, positional: list[Any], keywords: dict[str, Any]) -> bool:
    try:
        inspect.signature(model).bind(*positional, **keywords)
    except (TypeError, ValueError):
        return False
    return True


def _with_tensors(value: Any, left: Iterator[torch.Tensor]) -> Any:
    if value is LEAF:
        return next(left)
    if isinstance(value, dict):
        return {key: _with_tensors(item, left) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        items = cast("list[Any]", value)
        return type(items)(_with_tensors(item, left) for item in items)
    if isinstance(value, Built):
        return as_object(Built(value.name, _with_tensors(value.attributes, left)))
    return as_object(value) if isinstance(value, Named) else value
