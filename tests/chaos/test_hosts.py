"""Two hosts, one of them cut off from Redis or Postgres: no second verdict, no loss."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.chaos.network import Network
from tests.chaos.rig import PATIENCE_S

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(420)]
#: Seconds, longer than a lease and than the timeouts of all connections.
_PARTED_S = 45.0


@pytest.fixture(scope="module")
def hosts(network: Network, start_fleet: Any) -> list[Any]:
    """Start a fleet on each host."""
    addresses = {"database_url": network.postgres_url, "redis_url": network.redis_url}
    return [start_fleet(prefix=network.on(host), **addresses) for host in range(2)]


@pytest.mark.parametrize("service", [Network.REDIS, Network.POSTGRES], ids=["Redis", "Postgres"])
def test_a_host_may_be_parted_from_a_service(
    hosts: list[Any], network: Network, services: Any, whole: Any, service: str
) -> None:
    """A cut-off host's evaluation gets one verdict, the other host continues, and the healed host serves again."""
    assert [fleet.live()[0].host for fleet in hosts] == ["host-0", "host-1"]
    held = [services.submit("sleep 8", attempts=3) for _ in range(2)]
    for identity in held:
        services.started(identity)
    network.cut(0, service)
    try:
        begun = time.monotonic()
        meanwhile = [services.submit("sleep 0.2", attempts=3) for _ in range(20)]
        for identity in [*held, *meanwhile]:
            assert services.verdict(identity, 150).passed
        time.sleep(max(0.0, _PARTED_S - (time.monotonic() - begun)))
    finally:
        network.heal(0, service)
    whole(*held, *meanwhile)
    services.until(lambda: _serves(services, "host-0"), PATIENCE_S, "the parted host's work")
    whole(*held, *meanwhile)


def _serves(services: Any, host: str) -> bool:
    """Submit evaluations until a host claims one. Return whether it did."""
    ids = [services.submit("sleep 0.3", attempts=3) for _ in range(4)]
    for identity in ids:
        services.verdict(identity, PATIENCE_S)
    return bool(
        services.rows(
            "SELECT 1 FROM attempts AS a JOIN workers AS w ON w.id = a.worker_id "
            "WHERE a.evaluation_id = ANY(:ids) AND w.host = :host AND a.category = 'passed'",
            ids=ids,
            host=host,
        )
    )
