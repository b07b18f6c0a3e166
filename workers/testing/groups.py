"""Groups of tests that share a process, and what the processes of a run are told."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import pytest

Isolate = Literal["module", "class", "test"]


@dataclass(slots=True)
class Group:
    """Tests that share a process.

    Attributes:
        name: the module's, class's or test's, for people.
        items: the tests, in order.
    """

    name: str
    items: list[pytest.Item] = field(default_factory=list[pytest.Item])


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a process of tests is told, as JSON.

    Attributes:
        args: pytest's arguments, as the controlling pytest got them.
        program: ``sys.argv[0]`` there.
        searched: ``sys.path`` there, before a conftest or a test module had changed it.
        options: options of the controlling pytest that are plain values, as its plugins have settled them.
        tests: node ids of the tests to run, in order.
        files: where they are.
        basetemp: the folder for pytest's temporary directories.
        locks: of the devices that the tests use.
        renew_s, renew_bytes: after so much time, and so many bytes of what it has said, the process gives the tests
            that are left to another; None for never.
        said_bytes: about how much it may say; it then says less of what it reports. None for no limit.
        stacks_s: seconds after which a test's process shows where it is; None for never.
        paths: a folder that the process knows by the first name, and is to tell of by the second.
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
        """Write it to a file, for another process."""
        file.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, file: Path) -> Self:
        """Return what a file holds."""
        return cls(**json.loads(file.read_text()))


def named(group: Group) -> dict[str, Any]:
    """Return the fields of an order that say which tests are to run."""
    names = [item.nodeid for item in group.items]
    most = max(map(names.count, set(names)))
    return {"tests": names, "files": list(dict.fromkeys(str(item.path) for item in group.items)) * most}


def grouped(items: Iterable[pytest.Item], isolate: Isolate) -> list[Group]:
    """Return the groups of collected tests, in the order of their first tests.

    Tests outside of classes are one group of their module where ``isolate`` is ``class``.
    """
    groups: dict[tuple[Any, ...], Group] = {}
    for number, item in enumerate(items):
        file = item.getparent(pytest.File)
        inner: pytest.Item | pytest.Collector | None = file
        key: tuple[Any, ...] = (item.path,)
        if isolate == "class" and (found := item.getparent(pytest.Class)) is not None:
            inner = found
            key = (item.path, found.nodeid)
        elif isolate == "test":
            inner = item
            key = (item.path, number)
        groups.setdefault(key, Group(inner.nodeid if inner is not None else item.nodeid)).items.append(item)
    return list(groups.values())
