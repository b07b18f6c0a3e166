"""A collector for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.traces.collector import Collector, collector


@pytest.fixture
def taking() -> Iterator[Collector]:
    """Start a collector that accepts all requests."""
    with collector() as kept:
        yield kept
