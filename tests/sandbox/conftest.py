"""Fleets that seal processes: one of root if the tests run as root, and one of an ordinary user."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kqueue.config import load
from tests.sandbox.fleets import Fleet, started
from workers.judge.host import uids

#: Uid of a user without an entry in /etc/passwd. It is not 65534, because every user has that uid in a user namespace
#: without a map, and the tests could not see that the map is missing.
_ORDINARY = 12345


@pytest.fixture(scope="session")
def fleets() -> Iterator[dict[str, Fleet]]:
    if os.geteuid() != 0:
        with started({"ordinary": (os.geteuid(), 0)}) as ordinary:
            yield ordinary
        return
    held = uids.hold(load().candidate_uid)
    try:
        with started({"root": (0, held.uid), "ordinary": (_ORDINARY, 0)}) as both:
            yield both
    finally:
        held.release()


@pytest.fixture
def root_fleet(fleets: dict[str, Fleet]) -> Fleet:
    if "root" not in fleets:
        pytest.skip("these tests do not run as root")
    return fleets["root"]


@pytest.fixture
def ordinary_fleet(fleets: dict[str, Fleet]) -> Fleet:
    return fleets["ordinary"]


@pytest.fixture(params=["root_fleet", "ordinary_fleet"])
def fleet(request: pytest.FixtureRequest) -> Fleet:
    """Each of the two fleets in turn."""
    return request.getfixturevalue(request.param)
