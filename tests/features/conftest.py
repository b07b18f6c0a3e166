"""The command of a fleet, and a live fleet. Modules that test the API, the page or the tools import their fixtures."""

from collections.abc import Iterator

import pytest

from kqueue.local.fleet import LocalFleet
from tests.cli.fixtures import *  # noqa: F403
from tests.fleet.live import live_fleet
from tests.services import starts_services


@pytest.fixture(scope="session")
@starts_services
def live() -> Iterator[LocalFleet]:
    with live_fleet() as running:
        yield running
