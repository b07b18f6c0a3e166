"""Real services for the tests: one Postgres and one Valkey per run, a fresh database per test."""

from __future__ import annotations

import os

# Judges are forked from the tests' process. If a comparison in another test had started OpenMP's threads there, the
# child would wait for ever for threads that it does not have.
os.environ["OMP_NUM_THREADS"] = "1"

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from uuid import UUID, uuid4

import pytest
import redis
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.engine import make_url

from kqueue.categories import Category
from kqueue.config import Config, load
from kqueue.contract import Outcome, Phase
from kqueue.errors import LocalFleetError
from kqueue.evidence import NEEDS
from kqueue.local.postgres import Postgres
from kqueue.local.valkey import Valkey
from kqueue.store import schema, workers
from kqueue.store.engine import connect

_TEMPLATE = "kqueue_template"


def pytest_xdist_auto_num_workers() -> int:
    """Run two workers, because long tests mostly wait. On a GPU run one, because they would share it."""
    return 1 if Path("/dev/nvidiactl").exists() else 2


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep tests from the developer's own fleet."""
    for name in [name for name in os.environ if name.startswith("KQUEUE_") and name != "KQUEUE_REQUIRE_GPU"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KQUEUE_HOME", str(tmp_path / "home"))
    # Two fleets of tests must not use the same port.
    monkeypatch.setenv("KQUEUE_HTTP_PORT", "0")


def start(service: Postgres | Valkey) -> None:
    """Start a service. If its program is missing, skip the test, or fail it in CI."""
    try:
        service.start()
    except LocalFleetError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


def database(url: str, name: str) -> str:
    """Return the URL of another database on the same server."""
    return make_url(url).set(database=name).render_as_string(hide_password=False)


class Server:
    """The run's Postgres server, with a migrated template from which databases are cloned."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._admin = create_engine(url, isolation_level="AUTOCOMMIT", pool_size=1)
        self.empty_database(_TEMPLATE)
        schema.upgrade(database(url, _TEMPLATE))

    def execute(self, statement: str) -> None:
        """Run one statement as the server's owner."""
        with self._admin.connect() as connection:
            connection.execute(text(statement))

    def empty_database(self, name: str) -> str:
        """Create a database without a schema. Return its URL."""
        self.execute(f'CREATE DATABASE "{name}" TEMPLATE template0')
        return database(self._url, name)

    def clone(self) -> str:
        """Create a database with the newest schema. Return its URL."""
        name = f"test_{uuid4().hex}"
        self.execute(f'CREATE DATABASE "{name}" TEMPLATE "{_TEMPLATE}" STRATEGY file_copy')
        return database(self._url, name)

    def drop(self, url: str) -> None:
        """Drop a database, even if it has connections."""
        self.execute(f'DROP DATABASE IF EXISTS "{make_url(url).database}" WITH (FORCE)')

    def cut(self, url: str) -> None:
        """Break every connection to a database, as a restart of the server would."""
        self.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            f"WHERE datname = '{make_url(url).database}' AND pid <> pg_backend_pid()"
        )


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The run's Postgres."""
    postgres = Postgres(tmp_path_factory.mktemp("postgres"), durable=False)
    start(postgres)
    try:
        yield Server(postgres.url)
    finally:
        postgres.stop()


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    """The run's Valkey."""
    service = Valkey(tmp_path_factory.mktemp("valkey"))
    start(service)
    try:
        yield service
    finally:
        service.stop()


@pytest.fixture
def database_url(server: Server) -> Iterator[str]:
    """A fresh database at the newest schema."""
    url = server.clone()
    yield url
    server.drop(url)


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    """An engine on the fresh database, with room for concurrent tests."""
    engine = connect(database_url, application="tests", pool_size=16)
    yield engine
    engine.dispose()


@pytest.fixture
def redis_url(valkey: Valkey) -> str:
    """The run's Valkey, emptied."""
    with redis.Redis.from_url(valkey.url.replace("redis+socket://", "unix://")) as client:
        client.flushall()
    return valkey.url


@pytest.fixture
def config(database_url: str, redis_url: str, tmp_path: Path) -> Config:
    """Settings of a fleet on a fresh database and an empty Redis."""
    return load(database_url=database_url, redis_url=redis_url, home=tmp_path / "home", scratch=tmp_path / "scratch")


#: A value for each fact that some category needs.
_FACTS: Final[dict[str, Any]] = {
    "exception": "builtins.RuntimeError",
    "cuda_code": 700,
    "findings": [{"rule": "r", "severity": "cheat", "line": 1, "evidence": "e", "by": "kqueue", "meaning": "m"}],
    "reason": "deadline",
    "signal": "SIGSEGV",
    "structure": "[T]",
    "input": 0,
    "output": 0,
    "kind": "given",
    "wrong": 1,
    "of": 4,
    "first": [{"index": [0], "expected": 1.0, "got": 2.0}],
    "hack": "decoy",
    "clocks": {"sm_mhz": 210.0},
}


def ended(category: Category, **fields: Any) -> Outcome:
    """Make an outcome of this category with the least that it needs; ``fields`` replace it."""
    needs = NEEDS[category]
    least: dict[str, Any] = {"facts": {name: _FACTS[name] for name in (*needs.facts, *needs.one_of[:1])}}
    if needs.message:
        least["message"] = f"ended as {category}"
    if needs.phase:
        least["phase"] = Phase.CHECK
    return Outcome(category=category, **least | fields)


def request_fields(number: int = 0, **changes: object) -> dict[str, object]:
    """Return the fields of a valid request for the lane ``cpu``. Another ``number`` makes another kernel."""
    fields: dict[str, object] = {
        "problem": "class Model: ...",
        "kernel": f"class ModelNew: number = {number}",
        "backend": "torch",
        "lane": "cpu",
    }
    return fields | changes


@pytest.fixture
def fields() -> Callable[..., dict[str, object]]:
    """:func:`request_fields`."""
    return request_fields


@pytest.fixture
def worker_id(engine: Engine) -> UUID:
    """A live worker of the lane ``cpu``."""
    identity = uuid4()
    workers.register(engine, id=identity, name="cpu-0@here", host="here", pid=1, lanes=["cpu"], device="cpu")
    return identity
