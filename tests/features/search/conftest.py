"""One live fleet on the `cpu` lane for the searches of this folder."""

from collections.abc import Iterator

import pytest

from kqueue.local.fleet import LocalFleet
from tests.fleet.live import live_fleet
from tests.services import starts_services


@pytest.fixture(scope="session")
@starts_services
def live() -> Iterator[LocalFleet]:
    with live_fleet() as running:
        yield running
