"""Groups of tests that share a process, and the orders to the processes of a run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, cast

import pytest

Isolate = Literal["module", "class", "test"]
#: Keys of an order in addition to the fields of :class:`Order`: the repository's folder on the sender's host, the
#: relative folder in which pytest was started, and environment variables.
ROOT, STARTED_IN, ENVIRONMENT = "root", "started_in", "environment"


@dataclass(slots=True)
class Group:
    """Tests that share a process, in order. ``name`` is the node id of the module, class or test, for display."""

    name: str
    items: list[pytest.Item] = field(default_factory=list[pytest.Item])


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The order to a process of tests, which is sent as JSON.

    Attributes:
        args: the arguments of the controlling pytest.
        program: the controlling pytest's ``sys.argv[0]``.
        searched: the controlling pytest's ``sys.path`` before a conftest or a test module changed it.
        options: options of the controlling pytest with plain values, after its plugins changed them.
        tests: node ids of the tests to run, in order.
        files: the files of the tests.
        basetemp: the folder for pytest's temporary directories.
        locks: the locks of the devices that the tests use.
        renew_s, renew_bytes: seconds, and bytes of messages, after which the process hands the remaining tests to
            another process. None for no limit.
        said_bytes: approximate limit on the bytes of messages, near which reports are shortened. None for no limit.
        stacks_s: seconds after which a test's process prints its stacks, or None.
        paths: a folder's path in the process, and the path that replaces it in messages.
    """

    args: list[str]
    program: str
    searched: list[str]
    options: dict[str, bool | int | float | str | None]
    tests: list[str]
    files: list[str]
    basetemp: str
    locks: list[str]
    renew_s: float | None = None
    renew_bytes: int | None = None
    said_bytes: int | None = None
    stacks_s: float | None = None
    paths: tuple[str, str] | None = None

    def write(self, file: Path) -> None:
        """Write the order to a file for another process."""
        file.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, file: Path) -> Self:
        """Return the order in a file."""
        return cls(**json.loads(file.read_text()))


def named(group: Group) -> dict[str, Any]:
    """Return the part of an order that names the tests to run."""
    names = [item.nodeid for item in group.items]
    most = max(map(names.count, set(names)))
    return {"tests": names, "files": list(dict.fromkeys(str(item.path) for item in group.items)) * most}


def grouped(items: Iterable[pytest.Item], isolate: Isolate) -> list[Group]:
    """Return the groups of collected tests, in the order of their first tests.

    If ``isolate`` is ``class``, a module's tests outside of classes are one group.
    """
    groups: dict[tuple[Any, ...], Group] = {}
    for number, item in enumerate(items):
        file = item.getparent(pytest.File)
        inner: pytest.Item | pytest.Collector | None = file
        key: tuple[Any, ...] = (item.path,)
        if isolate == "class" and (parent := item.getparent(pytest.Class)) is not None:
            inner = parent
            key = (item.path, parent.nodeid)
        elif isolate == "test":
            inner = item
            key = (item.path, number)
        groups.setdefault(key, Group(inner.nodeid if inner is not None else item.nodeid)).items.append(item)
    return list(groups.values())


def moved(value: Any, there: str, here: str) -> Any:
    """Return a value with the folder ``there`` replaced by ``here`` in all texts, also within options and test names.

    A longer path with the same components does not match: ``/app`` is not replaced in ``backend/app``.
    """
    match value:
        case str():
            return re.sub(rf"(?<![\w./]){re.escape(there)}(?![\w.-])", lambda _: here, value)
        case dict():
            return {name: moved(inner, there, here) for name, inner in cast("dict[str, Any]", value).items()}
        case list():
            return [moved(inner, there, here) for inner in cast("list[Any]", value)]
        case _:
            return value
