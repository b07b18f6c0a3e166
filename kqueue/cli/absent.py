"""A stand-in for the database's packages, without which commands still ask a server.

A report is a query and the classes of its rows, in one module. A command that asks a server uses only the classes. All
other commands are refused by :meth:`~kqueue.config.Config.require_database`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

_PACKAGES: Final = ("psycopg", "sqlalchemy")


class _Any(type):
    """Makes a class whose attributes, results and combinations are the stand-in."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name != "__table__":
            raise AttributeError(name)
        return _StandIn

    def __call__(cls, *_: Any, **__: Any) -> Any:
        return _StandIn

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    __hash__ = type.__hash__


for _name in (
    *("__getitem__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__neg__", "__invert__"),
    *(f"__{side}{name}__" for name in ("add", "sub", "mul", "truediv", "and", "or", "mod") for side in ("", "r")),
):
    setattr(_Any, _name, _Any.__call__)


class _StandIn(metaclass=_Any):
    """Any object of an absent package."""


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(_StandIn, name)


class _Finder(MetaPathFinder, Loader):
    """Finds and makes the modules of the packages."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        package = name.partition(".")[0]
        # An installed package can lack a module.
        wanted = package in _PACKAGES and (package == name or isinstance(sys.modules.get(package), _Module))
        return ModuleSpec(name, self, is_package=True) if wanted else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module as it is."""


_FINDER: Final = _Finder()


def stand_in() -> None:
    """Let the packages be imported where they are not installed."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)
