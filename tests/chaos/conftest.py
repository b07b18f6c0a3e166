"""Fixtures for tests that kill, stop or empty parts of a fleet."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.chaos.family import living, words
from tests.chaos.network import Network, NoNetwork
from tests.chaos.rig import Whole
from tests.fleet import told
from workers.judge.host import linux

#: The services and fleets of tests/fleet.


@pytest.fixture
def whole(services: told.Services) -> Whole:
    """Check the invariants at the end."""
    return Whole(services)


@pytest.fixture(scope="module")
def network(services: told.Services) -> Iterator[Network]:
    """Two hosts that reach this module's services over TCP."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    redis_socket = Path(services.valkey.url.removeprefix("redis+socket://"))
    postgres_socket = Path(services.postgres._sockets) / services.postgres.socket_name
    try:
        with Network(redis_socket, postgres_socket, hosts=2) as network:
            yield network
    except NoNetwork as error:
        pytest.skip(f"no network of several hosts can be made here: {error}")


@pytest.fixture(autouse=True)
def _no_orphan(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check for leftovers of a test's fleets, which become children of the tests' process. Supervisors keep running."""
    if "services" not in request.fixturenames:
        yield
        return
    services: told.Services = request.getfixturevalue("services")
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    mine = set(linux.children(os.getpid()))
    try:
        yield

        def strangers() -> list[int]:
            found = living(set(linux.children(os.getpid())) - mine - {services.postgres.pid, services.valkey.pid})
            return [pid for pid in found if not {"run_fleet.py", "workers.fleet"} & {Path(w).name for w in words(pid)}]

        with suppress(AssertionError):
            services.until(lambda: not strangers())
        assert [f"{pid}: {words(pid)}" for pid in strangers()] == []
    finally:
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 0)
