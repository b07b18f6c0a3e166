"""A collector for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.traces.collector import Collector, collector


@pytest.fixture
def taking() -> Iterator[Collector]:
    """A collector that takes all."""
    with collector() as kept:
        yield kept
