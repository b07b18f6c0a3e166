"""Parts that packages add by entry points: features, and the loader that :mod:`kqueue.backends` uses too.

A feature is a folder with all that is its own. Its package registers it by an entry point in the group
``kqueue.features``. The entry's name is the feature's, and it refers to a :class:`Feature`::

    [project.entry-points."kqueue.features"]
    mine = "my_package.feature:MINE"

The command line, the API, the page, the tools, the clients and the store read the features here and know none by name.
A description is loaded often, so its module imports nothing but this one. It refers to all else by texts such as
``my_package.commands:run``, which are imported at the first use.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any, Final, TypeVar

from kqueue.errors import ConfigError

_T = TypeVar("_T")
_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command.

    Attributes:
        name: its name.
        function: its function, whose parameters are its options. With ``is_group``, a function that returns a group.
        after: the command that precedes it in the help.
        answers: True if its exit status is an answer.
        is_group: True for a group of commands.
    """

    name: str
    function: str
    after: str
    answers: bool = False
    is_group: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """A feature, and the places where it attaches.

    Attributes:
        name: its name, and the one of its folder of templates.
        commands: its commands.
        routers: routers of the API.
        pages: routers of the page.
        templates: the package with its folder ``templates``, which pages name after the feature's name.
        batch: function that returns HTML for the page of a batch, from the engine and the batch's name, or None.
        tools: mapping from the functions of its tools to their hints.
        advice: sentences on its tools for agents.
        client, async_client: base class of the client, and of the one for asyncio, with its methods.
        names: modules of its names in the package ``kqueue``.
        trials: beginnings of the names of batches whose evaluations are trials.
        runs: kinds of recorded runs by their algorithm. Their evaluations are trials.
    """

    name: str
    commands: tuple[Command, ...] = ()
    routers: tuple[str, ...] = ()
    pages: tuple[str, ...] = ()
    templates: str = ""
    batch: str = ""
    tools: str = ""
    advice: str = ""
    client: str = ""
    async_client: str = ""
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    trials: tuple[str, ...] = ()
    runs: Mapping[str, str] = field(default_factory=dict[str, str])


def entries(group: str, kind: type[_T], *taken: str) -> Mapping[str, _T]:
    """Return the objects that packages register in a group, by name in alphabetical order.

    Args:
        taken: names that no entry can have.

    Raises:
        ConfigError: an entry cannot be used, or there is none.
    """
    what, found = kind.__name__.lower(), dict[str, _T]()
    for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
        shown = f"the {what} {entry.name} ({entry.value})"
        try:
            one: Any = entry.load()
        except Exception as error:
            raise ConfigError(f"{shown} cannot be loaded: {error!r}. Install its package again or remove it") from error
        if not isinstance(one, kind) or getattr(one, "name", None) != entry.name or not _NAME.fullmatch(entry.name):
            raise ConfigError(f"{shown} is not a {kind.__module__}.{kind.__name__} with this name in lower case")
        if entry.name in found or entry.name in taken:
            raise ConfigError(f"{shown} has the name of another {what}: remove one of the packages")
        found[entry.name] = one
    if not found:
        raise ConfigError(f"no {what}s are registered: install kqueue again (in a checkout, `make venv`)")
    return MappingProxyType(found)


@cache
def features() -> Mapping[str, Feature]:
    """Return the features by name, or raise the ConfigError of :func:`entries`."""
    return entries("kqueue.features", Feature)


def attached(place: str) -> list[Any]:
    """Return what all features attach at a place: the objects that their attribute of this name refers to."""
    given = (getattr(feature, place) for feature in features().values())
    texts = (text for one in given if one for text in ((one,) if isinstance(one, str) else one))
    return [resolve_name(text) for text in texts]


def commands() -> list[Command]:
    """Return the commands of all features."""
    return [command for feature in features().values() for command in feature.commands]
