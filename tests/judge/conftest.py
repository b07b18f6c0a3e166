"""Fixtures that end what the tests of this folder start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.judge import loopback
from tests.judge.rig import Rig
from workers.judge.api import Judges


@pytest.fixture(autouse=True)
def _end_loopbacks() -> Iterator[None]:
    yield
    while loopback.running:
        loopback.running.pop().close()


@pytest.fixture
def judges(rig: Rig) -> Iterator[Judges]:
    standing = Judges(rig.forkserver)
    yield standing
    standing.leave()
