"""Fixtures of real fleets, for every folder: pytest loads this module as a plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kqueue.local.postgres import Postgres
from kqueue.local.valkey import Valkey
from kqueue.store import schema
from tests.fleet.told import Fleet, Services, fleets
from tests.services import starts_services


@pytest.fixture(scope="module")
@starts_services
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """Postgres with the schema, and Valkey, for this module alone: its tests stop them."""
    directory = tmp_path_factory.mktemp("fleet")
    directory.chmod(0o755)
    with Postgres(directory / "pg", durable=False) as postgres, Valkey(directory / "valkey") as valkey:
        schema.upgrade(postgres.url)
        services = Services(postgres, valkey, directory)
        yield services
        services.engine.dispose()
        services.app.close()


@pytest.fixture(scope="module")
def start_fleet(services: Services) -> Iterator[Callable[..., Fleet]]:
    """The function of :func:`fleets`."""
    with fleets(services) as start:
        yield start


@pytest.fixture(scope="module")
def fleet(start_fleet: Callable[..., Fleet]) -> Fleet:
    """One worker, shared by the module's tests."""
    return start_fleet()
