"""TLS to both services with certificates made here: every client uses it, and refuses anything else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from sqlalchemy.engine import make_url

from kqueue import broker
from kqueue.client import Client
from kqueue.config import Config
from kqueue.errors import BrokerUnavailable, ConfigError, DatabaseUnavailable
from kqueue.store import schema
from kqueue.store.engine import connect, connect_listener, transaction
from tests.fleet.told import fleets
from tests.security.house import House, running_flower
from tests.security.tls import Door, tcp, unix
from tests.waiting import until

trustme = pytest.importorskip("trustme")


@dataclass
class Doors:
    """TLS proxies of both services, and their certificate authority."""

    postgres: Door
    redis: Door
    authority: Path


@dataclass
class Place:
    """A house behind TLS proxies: valid ones, and some that are wrong in one way each."""

    house: House
    kinds: dict[str, Doors]

    def database(self, kind: str, user: str = "producer") -> str:
        """Return the database's address."""
        doors = self.kinds[kind]
        direct = make_url(self.house.logins[user])
        tls = {"sslmode": "verify-full", "sslrootcert": str(doors.authority)}
        return direct.set(host="localhost", port=doors.postgres.port, query=tls).render_as_string(hide_password=False)

    def redis(self, kind: str, user: str = "producer") -> str:
        """Return the broker's address."""
        doors = self.kinds[kind]
        who = f"{user}:{self.house.guarded.passwords[user]}"
        return f"rediss://{who}@localhost:{doors.redis.port}/0?ssl_ca_certs={quote(str(doors.authority))}"

    def settings(self, kind: str, user: str = "producer") -> dict[str, str]:
        """Return the addresses of both services."""
        return {"database_url": self.database(kind, user), "redis_url": self.redis(kind, user)}

    def config(self, kind: str, user: str = "producer") -> Config:
        """Return the configuration."""
        return self.house.services.config(**self.settings(kind, user))


@pytest.fixture(scope="module")
def place(house: House) -> Iterator[Place]:
    """Make valid proxies, and some with another authority, another host's name, and without TLS."""
    directory = house.services.directory
    owner = make_url(house.services.postgres.url)
    behind = unix(Path(str(owner.query["host"])) / ".s.PGSQL.5432"), tcp(house.guarded.port)
    ours, theirs = trustme.CA(), trustme.CA()
    authority = directory / "authority.pem"
    ours.cert_pem.write_to_path(str(authority))
    house.logins["owner"] = house.services.postgres.url
    certificates = {
        "right": ours.issue_cert("localhost"),
        "another authority": theirs.issue_cert("localhost"),
        "another host": ours.issue_cert("elsewhere.example"),
        "no TLS": None,
    }
    kinds = {
        kind: Doors(
            Door(behind[0], certificate, postgres=True), Door(behind[1], certificate, postgres=False), authority
        )
        for kind, certificate in certificates.items()
    }
    for doors in kinds.values():
        doors.postgres.__enter__()
        doors.redis.__enter__()
    yield Place(house, kinds)
    for doors in kinds.values():
        doors.postgres.__exit__()
        doors.redis.__exit__()


WRONG = {
    "another authority": ("certificate verify failed", "certificate verify failed"),
    "another host": ("does not match host name", "Hostname mismatch"),
    # Redis waits for the end of a presumed command.
    "no TLS": ("does not support SSL", "TLS"),
}


@pytest.mark.nightly
def test_everything_takes_it(place: Place) -> None:
    """Migration, client, listener, supervisor, workers and Flower judge together behind TLS proxies."""
    house = place.house
    url = place.database("right", "owner")
    schema.upgrade(url)
    assert schema.current(url) == schema.head()
    doors = place.kinds["right"]
    before = doors.postgres.passed, doors.redis.passed
    log = house.services.directory / "flower-tls.log"
    flower_config = house.services.config(redis_url=place.redis("right", "flower"))
    with (
        fleets(house.services) as start,
        running_flower(flower_config, log) as flower,
        Client(**place.settings("right")) as client,
    ):
        fleet = start(**place.settings("right", "worker"))
        assert client.submit(problem="p", kernel="ok", backend="torch", lane="cpu").wait(60).category == "passed"
        running = client.submit(problem="p", kernel="sleep 60", backend="torch", lane="cpu")
        house.services.started(running.evaluation_id)
        assert running.cancel()
        until(lambda: not [w for w in fleet.live() if w.busy_with], what="the worker's freedom")
        until(lambda: flower.get("/api/workers?refresh=true"), what="a worker in Flower")
        assert flower.get("/api/queues/length")
    assert doors.postgres.passed > before[0]
    assert doors.redis.passed > before[1]


def test_a_service_is_not_who_it_should_be(place: Place) -> None:
    """Queries, the listener, a migration and messages refuse a wrong service, and the error has the reason."""
    for kind, (database_says, redis_says) in WRONG.items():
        url = place.database(kind)
        engine = connect(url, application="tests")
        with pytest.raises(DatabaseUnavailable, match=database_says), transaction(engine):
            pass
        engine.dispose()
        with pytest.raises(DatabaseUnavailable, match=database_says):
            connect_listener(url, application="tests")
        with pytest.raises(DatabaseUnavailable, match=database_says):
            schema.upgrade(url)
        with pytest.raises(BrokerUnavailable, match=redis_says) as told:
            broker.check(broker.make_app(place.config(kind)))
        assert kind == "no TLS" or "ssl_ca_certs" in str(told.value)
        assert place.house.guarded.passwords["producer"] not in str(told.value)


@pytest.mark.nightly
def test_a_fleet_does_not_start_there(place: Place) -> None:
    """The supervisor waits a while for either service, then exits with the reason."""
    right, password = place.settings("right", "worker"), place.house.guarded.passwords["worker"]
    started: dict[str, subprocess.Popen[str]] = {}
    # The other pairs fail in the same functions, which the tests above show.
    for service, kind in (("database_url", "another authority"), ("redis_url", "another host")):
        reason = WRONG[kind][service == "redis_url"]
        settings = right | {service: place.settings(kind, "worker")[service]}
        environment = place.house.services.config(**settings, cpu_slots=1).environment()
        started[f"{service}, {kind}: {reason}"] = subprocess.Popen(
            [sys.executable, "-P", "-m", "workers.fleet"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    for what, fleet in started.items():
        out, err = fleet.communicate(timeout=120)
        assert fleet.returncode == 3, what
        assert what.partition(": ")[2] in err, what
        assert password not in out + err, what


def test_verifying_is_not_to_be_switched_off(place: Place) -> None:
    """Settings that weaken TLS, missing files, and an authority with redis:// are refused."""
    for url, says in (
        ("rediss://u:hidden@localhost:1/0?ssl_cert_reqs=none", "Certificates are always verified"),
        ("rediss://u:hidden@localhost:1/0?ssl_check_hostname=false", "Certificates are always verified"),
        ("rediss://u:hidden@localhost:1/0?ssl_ca_certs=/no/such/file", "cannot be read"),
        ("redis://u:hidden@localhost:1/0?ssl_ca_certs=/x", "rediss://"),
    ):
        with pytest.raises(ConfigError, match=says) as told:
            broker.make_app(place.house.services.config(redis_url=url))
        assert "hidden" not in str(told.value)


def test_a_door_with_tls_lets_in_nobody_without(place: Place) -> None:
    """A client without TLS is refused, without which the tests above would prove little."""
    right: Any = place.kinds["right"]
    plain = place.house.services.config(redis_url=f"redis://localhost:{right.redis.port}/0")
    with pytest.raises(BrokerUnavailable):
        broker.check(broker.make_app(plain))
    url = f"postgresql+psycopg://producer@localhost:{right.postgres.port}/kqueue?sslmode=disable"
    with pytest.raises(DatabaseUnavailable):
        schema.current(url)
