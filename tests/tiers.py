"""Marks tests as quick or not, and prevents quick tests from starting services: a plugin of pytest.

A test is quick, and runs in ``make quick``, unless one of these holds:

- one of its fixtures, or one of their fixtures, is marked with :func:`tests.services.starts_services`.
- it or its module is marked ``services``, because it starts programs itself.
- it is marked ``slow`` (with a reason), ``gpu``, ``nightly`` or ``compose``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from tests.services import starts_some

#: Programs, modules and scripts that are services or start some.
_SERVICES: Final = frozenset(
    {"celery", "initdb", "postgres", "redis-server", "run_fleet.py", "uvicorn", "valkey-server", "workers.fleet"}
)
#: Commands of `kqueue` that start services.
_COMMANDS: Final = frozenset({"serve", "up"})
#: Markers of tests that are not quick.
_NOT_QUICK: Final = ("services", "slow", "gpu", "nightly", "compose")

#: Services that the current quick test has tried to start, or None during another test.
_started: list[str] | None = None


class NotQuick(RuntimeError):
    """Raised when a quick test tries to start a service."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark quick tests and tests that need services, and move files with long tests to the front."""
    for item in items:
        fixtures: dict[str, Sequence[pytest.FixtureDef[Any]]] = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
        if any(starts_some(definition.func) for found in fixtures.values() for definition in found[-1:]):
            item.add_marker("services")
        for marker in item.iter_markers("slow"):
            if not marker.args:
                raise pytest.UsageError(f"{item.nodeid}: give a reason, as in pytest.mark.slow('compiles C++')")
        if not any(item.get_closest_marker(name) for name in _NOT_QUICK):
            item.add_marker("quick")
    long = {item.path for item in items if not item.get_closest_marker("quick")}
    items.sort(key=lambda item: item.path not in long)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fail a quick test that starts a service in its setup or its call."""
    global _started
    _started = started = [] if item.get_closest_marker("quick") else None
    try:
        return (yield)
    finally:
        _started = None
        if started:  # the test can have caught the error, or another thread raised it
            pytest.fail(
                f"{item.nodeid} is a quick test and starts {', '.join(started)}: use a fixture that is marked "
                "starts_services, or mark the test with pytest.mark.services"
            )


pytest_runtest_call = pytest_runtest_setup


def _guard(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse to start a service from this process for a quick test."""
    if event != "subprocess.Popen" or _started is None:
        return
    given = arguments[1]
    words = [os.fsdecode(word) for word in ([given] if isinstance(given, str | bytes | os.PathLike) else given)]
    names = [Path(word).name for word in words]
    commands = {after for word, after in zip(names, words[1:], strict=False) if word == "kqueue"}
    if found := sorted((_SERVICES & set(names)) | (_COMMANDS & commands)):
        _started.extend(found)
        raise NotQuick(f"a quick test starts {', '.join(found)}")


sys.addaudithook(_guard)
