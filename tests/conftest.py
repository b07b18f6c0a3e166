"""Real services for the tests: one Postgres and one Valkey per run, a fresh database per test."""

from __future__ import annotations

import gc
import os
import signal
import sys

# Tests start hundreds of Pythons, and without bytecode each would compile all its imports: torch takes twice as long
# then. Processes forked from the tests' process must write nothing, so it caches bytecode only until the tests are
# collected.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False

from tests.services import starts_services

# Judges are forked from the tests' process. If a comparison in another test had started OpenMP's threads there, the
# child would wait forever for threads that it does not have.
os.environ["OMP_NUM_THREADS"] = "1"

# From a file each client of HTTP reads all certificate authorities, which takes 25 ms. From a folder it reads none.
os.environ.pop("SSL_CERT_FILE", None)
os.environ.setdefault("SSL_CERT_DIR", "/etc/ssl/certs")

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import hypothesis
import pytest
import redis
import structlog
from sqlalchemy import Engine

from kqueue.config import Config, load
from kqueue.local.servers import Postgres, Valkey
from kqueue.store import engine as engines
from kqueue.store.engine import connect
from tests.samples import request_fields
from tests.services import Server, database, start, with_schema
from tests.store.steps import lasting_worker

pytest_plugins = ["pytester", "tests.tiers", "tests.fleet.fixtures", "tests.health.fixtures", "tests.judge.fixtures"]
# jsonschema would build 38 grammars for formats that no schema here has, which takes a tenth of the collection's time.
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]
# On a busy machine an example takes any time.
hypothesis.settings.register_profile("kqueue", deadline=None)
hypothesis.settings.load_profile("kqueue")
# Servers in the tests' process log at any time, and tests read what commands in the same process print.
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.__stderr__))
# A shell's background job ignores SIGINT, and all processes that the tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collectstart() -> None:
    """Collect no garbage while test modules are imported, because almost all new objects stay."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Write no more bytecode, and exempt imported objects from garbage collection, so that forks share them.

    A collection before that would take two seconds and free little.
    """
    sys.dont_write_bytecode = True
    gc.enable()
    gc.freeze()


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Run three workers on two cores, because long tests wait half of their time. Quick tests do not wait.

    On a GPU run one, because they would share it. A worker takes up to 2 GiB with its fleets.
    """
    if Path("/dev/nvidiactl").exists():
        return 1
    cores = len(os.sched_getaffinity(0))
    return min(8, cores if config.option.markexpr == "quick" else (3 * cores + 1) // 2)


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide the developer's fleet from tests."""
    for name in [name for name in os.environ if name.startswith("KQUEUE_") and name != "KQUEUE_REQUIRE_GPU"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KQUEUE_HOME", str(tmp_path / "home"))
    # Two fleets of tests must not use the same port.
    monkeypatch.setenv("KQUEUE_HTTP_PORT", "0")


@pytest.fixture
def anyio_backend() -> str:
    """Return the event loop of coroutine tests."""
    return "asyncio"


@pytest.fixture(scope="session")
@starts_services
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start the run's Postgres."""
    postgres = Postgres(with_schema(tmp_path_factory.mktemp("postgres") / "pg"), durable=False)
    start(postgres)
    make = engines.create_engine
    known = make(database(postgres.url, "postgres"))
    known.connect().close()
    known.dispose()

    def create_engine(*arguments: Any, **more: Any) -> Engine:
        """Share compiled statements between engines, because each would compile them for its first test."""
        engine = make(*arguments, **more, _initialize=False)
        engine.dialect, engine._compiled_cache = known.dialect, known._compiled_cache
        return engine

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engines, "create_engine", create_engine)
            yield Server(postgres.url)
    finally:
        postgres.stop()


@pytest.fixture(scope="session")
@starts_services
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    """Start the run's Valkey."""
    service = Valkey(tmp_path_factory.mktemp("valkey"))
    start(service)
    try:
        yield service
    finally:
        service.stop()


@pytest.fixture
def database_url(server: Server) -> Iterator[str]:
    """Return a database without rows at the newest schema."""
    url = server.take()
    yield url
    server.give_back(url)


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    """Return an engine on the fresh database, with room for concurrent tests."""
    engine = connect(database_url, application="tests", pool_size=16)
    yield engine
    engine.dispose()


@pytest.fixture
def redis_url(valkey: Valkey) -> str:
    """Return the URL of the run's Valkey, emptied."""
    with redis.Redis.from_url(valkey.url.replace("redis+socket://", "unix://")) as client:
        client.flushall()
    return valkey.url


@pytest.fixture
def config(database_url: str, redis_url: str, tmp_path: Path) -> Config:
    """Return settings of a fleet on a fresh database and an empty Redis."""
    return load(database_url=database_url, redis_url=redis_url, home=tmp_path / "home", scratch=tmp_path / "scratch")


@pytest.fixture
def fields() -> Callable[..., dict[str, object]]:
    """Return :func:`request_fields`."""
    return request_fields


@pytest.fixture
def worker_id(engine: Engine) -> UUID:
    """Return a worker of the lane ``cpu`` that counts as alive however long the test takes."""
    return lasting_worker(engine)
