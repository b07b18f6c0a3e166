"""Fleets that seal processes: one of root if the tests run as root, and one of an ordinary user."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kqueue.config import load
from tests.sandbox.fleets import Fleet, started
from workers.judge.host import uids

_NOBODY = 65534


@pytest.fixture(scope="session")
def root_fleet() -> Iterator[Fleet]:
    if os.geteuid() != 0:
        pytest.skip("these tests do not run as root")
    held = uids.hold(load().candidate_uid)
    try:
        yield from started(0, held.uid)
    finally:
        held.release()


@pytest.fixture(scope="session")
def ordinary_fleet() -> Iterator[Fleet]:
    yield from started(_NOBODY if os.geteuid() == 0 else os.geteuid(), 0)


@pytest.fixture(params=["root_fleet", "ordinary_fleet"])
def fleet(request: pytest.FixtureRequest) -> Fleet:
    """Each of the two fleets in turn."""
    return request.getfixturevalue(request.param)
