"""One live fleet on the `cpu` lane for the searches of this folder, and the packages of `make adapters`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kqueue.local.fleet import LocalFleet
from tests.fleet.live import live_fleet
from tests.services import starts_services

# Last, so that installed packages take precedence.
sys.path.append(str(Path(__file__).resolve().parents[2] / ".adapters"))


@pytest.fixture(scope="session")
@starts_services
def live() -> Iterator[LocalFleet]:
    with live_fleet() as running:
        yield running
