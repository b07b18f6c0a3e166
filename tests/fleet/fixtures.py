"""Fixtures of real fleets, for every folder: pytest loads this module as a plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kqueue.local.servers import Postgres, Valkey
from tests.fleet.told import Fleet, Services, fleets, renewing
from tests.services import starts_services, with_schema


@pytest.fixture(scope="module")
@starts_services
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """Start Postgres with the schema, and Valkey, for this module only, because its tests stop them."""
    directory = tmp_path_factory.mktemp("fleet")
    directory.chmod(0o755)
    postgres = Postgres(with_schema(directory / "pg"), durable=False)
    with postgres, Valkey(directory / "valkey") as valkey:
        services = Services(postgres, valkey, directory)
        yield services
        services.engine.dispose()
        services.app.close()


@pytest.fixture(scope="module")
def start_fleet(services: Services) -> Iterator[Callable[..., Fleet]]:
    with fleets(services) as start:
        yield start


@pytest.fixture(scope="module")
def running_fleet(start_fleet: Callable[..., Fleet]) -> Callable[[], Fleet]:
    """Return the module's fleet of one worker. If a test has ended it, start another first."""
    return renewing(start_fleet)


@pytest.fixture
def fleet(running_fleet: Callable[[], Fleet]) -> Fleet:
    """Return the module's running fleet, which a test can end."""
    return running_fleet()
