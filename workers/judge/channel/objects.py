"""Arguments that are objects: functions, classes and modules of torch, and generators of random numbers.

They are sent as a name, and as a name with attributes. Only a sealed process makes objects from names. To the judge
they are plain data.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any, Final, cast

import torch

#: Modules whose functions and classes every sealed process has.
_PLACES: Final = {"torch": torch, "torch.nn": torch.nn, "torch.nn.functional": torch.nn.functional, "math": math}
_GENERATOR: Final = "torch.Generator"
#: Attributes that hold the tensors and the parts of a module.
_HELD: Final = ("_parameters", "_buffers", "_modules")
#: Attributes that any module has and that do not change its results.
_COMMON: Final = vars(torch.nn.Module()).keys() - {*_HELD, "training"}


@dataclass(frozen=True, slots=True)
class Named:
    """A function or class by its name, such as ``torch.nn.functional.gelu``."""

    name: str


@dataclass(frozen=True, slots=True)
class Built:
    """A module or generator, by the name of its class and its attributes."""

    name: str
    attributes: dict[str, Any]


def as_data(value: Any) -> Any:
    """Return the data from which :func:`as_object` makes an equal object.

    Raise a ValueError that describes the object if there is no such data.
    """
    if isinstance(value, Named | Built):
        return value
    if name := _name_of(value):
        return Named(name)
    kind = cast("type[Any]", type(value))
    if kind is torch.Generator:
        return Built(_GENERATOR, {"seed": value.initial_seed(), "device": value.device.type})
    if isinstance(value, torch.nn.Module) and (name := _name_of(kind)):
        own = {name: held for name, held in vars(value).items() if name not in _COMMON}
        return Built(name, own | {name: dict(own[name]) for name in _HELD})
    if inspect.isgenerator(value):
        raise ValueError("a Python generator, which can be used only once. Return a list of its values")
    if callable(value) or inspect.ismodule(value):
        what = value if isinstance(value, type) or inspect.isroutine(value) else kind
        raise ValueError(
            f"{getattr(what, '__name__', 'an object')}, which only the problem's process has. Of such objects, only"
            " functions, classes and modules of torch and torch.nn can be sent"
        )
    raise ValueError(f"a value of the type {kind.__name__}")


def as_object(data: Named | Built) -> Any:
    """Return the object of a sealed process. The tensors among its attributes are on the device already."""
    place, _, name = data.name.rpartition(".")
    found = getattr(_PLACES.get(place), name, None)
    if not callable(found):
        raise ValueError(f"{data.name} is no function or class of torch")
    if isinstance(data, Named):
        return found
    attributes = dict(data.attributes)
    if data.name == _GENERATOR:
        return torch.Generator(attributes["device"]).manual_seed(attributes["seed"])
    module = cast("type[torch.nn.Module]", found).__new__(cast("Any", found))
    torch.nn.Module.__init__(module)
    attributes["_parameters"] = {
        name: None if value is None else torch.nn.Parameter(value, requires_grad=value.is_floating_point())
        for name, value in attributes["_parameters"].items()
    }
    vars(module).update(attributes)
    return module


def _name_of(value: Any) -> str:
    """Return the name of a function or class of torch, or an empty string."""
    name = getattr(value, "__name__", None)
    if not isinstance(name, str) or not callable(value):
        return ""
    return next((f"{place}.{name}" for place, module in _PLACES.items() if getattr(module, name, None) is value), "")
