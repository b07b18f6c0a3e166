"""Parts that packages add by entry points: features, and the loader that :mod:`kqueue.backends` uses too.

An entry point in the group ``kqueue.features`` has the feature's name, and refers to a :class:`Feature`::

    [project.entry-points."kqueue.features"]
    mine = "my_package.feature:MINE"

The command line, the API, the page, the tools, the clients and the store read them here and know none by name. A
description's module imports nothing but this one. Texts such as ``my_package.commands:run`` refer to all else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar

from kqueue.errors import ConfigError

_T = TypeVar("_T")
_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")


class Command(NamedTuple):
    """A command. ``answers`` is True if its exit status is an answer."""

    name: str
    function: str
    after: str
    answers: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """A feature, and the objects that it attaches.

    Attributes:
        commands: with the command that precedes each in the help. A group is an object of Typer.
        router, pages: its router of the API, and of the page.
        serve: coroutine function that a server of the API runs with its gateway until it ends.
        templates: the package of its folder ``templates``, whose files pages name after the feature.
        navigation: paths and names of its main pages.
        batch: function that returns HTML for the page of a batch, or None, from the engine and the batch's name.
        evaluation: the same for an evaluation, from the engine, the viewer and the evaluation's detail.
        failure: module with ``hint``, a line on a verdict, and ``dissect``, which `kqueue judge --autopsy` calls.
        tool: function of its tool, which submits.
        advice: a sentence on its tool for agents, with a space.
        client: class with its methods of clients, as coroutines.
        names: the modules of its names in the package ``kqueue``.
        formats: its modules of other projects' formats of problems (:mod:`kqueue.formats`).
        charts: function that returns a run's name, and the functions that make its charts by kind.
        trials: beginnings of the names of batches of trials.
        runs: classes of recorded runs by algorithm. Their evaluations are trials.
        duty: module with ``sweep``, which a fleet's sweeps call and which returns True if it submitted evaluations,
            ``held``, the reason to pause a host's CPU slots, and ``honest``, a request that any correct judge passes.
        record: dataclass of its last day, a part of the fleet's state, with ``read``, ``lines`` for `kqueue status`,
            ``check`` for `kqueue doctor`, and ``gauges`` for metrics. The page has its template ``now.html``.
    """

    name: str
    commands: tuple[Command, ...] = ()
    router: str = ""
    pages: str = ""
    serve: str = ""
    templates: str = ""
    navigation: tuple[tuple[str, str], ...] = ()
    batch: str = ""
    evaluation: str = ""
    failure: str = ""
    tool: str = ""
    advice: str = ""
    client: str = ""
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    formats: tuple[str, ...] = ()
    charts: str = ""
    trials: tuple[str, ...] = ()
    runs: Mapping[str, str] = field(default_factory=dict[str, str])
    duty: str = ""
    record: str = ""


def entries(group: str, kind: type[_T], *taken: str) -> Mapping[str, _T]:
    """Return the objects that packages register in a group, by name in alphabetical order. ``taken`` names are refused.

    Raise ConfigError if an entry cannot be used, or if there is none.
    """
    from importlib.metadata import entry_points  # slow, and most commands need no feature

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


def by_feature(place: str) -> dict[str, Any]:
    """Return what features attach at a place: the objects that their attributes of this name refer to, by feature."""
    return {name: resolve_name(text) for name, feature in features().items() if (text := getattr(feature, place))}


def attached(place: str) -> list[Any]:
    """Return the objects of :func:`by_feature`."""
    return [*by_feature(place).values()]


def each_of(place: str) -> list[Any]:
    """Return the items of what all features attach at a place."""
    return [one for feature in features().values() for one in getattr(feature, place)]
