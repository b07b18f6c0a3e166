"""The HTTP server on a real port of loopback, in front of real services; a stand-in judges."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from uuid import UUID

import httpx
import pytest
from sqlalchemy import Engine, text

from kqueue.categories import Category
from kqueue.config import Config
from kqueue.contract import Outcome
from kqueue.evidence import Evidence, Measurement
from kqueue.http.app import create_app
from kqueue.http.server import Server, listen, listen_at
from kqueue.store import evaluations, tokens
from tests.http.serving import admin_token


def until(look: Callable[[], object], timeout_s: float = 30.0, what: str = "it") -> None:
    """Look until there is something to see."""
    deadline = time.monotonic() + timeout_s
    while not look():
        assert time.monotonic() < deadline, f"{what} did not come within {timeout_s} s"
        time.sleep(0.02)


class Served:
    """The application on uvicorn in a thread of this process, until closed."""

    def __init__(self, config: Config, path: Path | None = None) -> None:
        """Serve on loopback, and on a unix socket at ``path`` too."""
        self._config = config
        self.app = create_app(config)
        self._sockets = [listen("127.0.0.1", 0), *([] if path is None else [listen_at(path)])]
        self.url = f"http://127.0.0.1:{self._sockets[0].getsockname()[1]}"
        self._server = Server(self.app)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": self._sockets})
        self._thread.start()
        until(lambda: self._server.started or not self._thread.is_alive(), what="the server")
        assert self._server.started

    @cached_property
    def admin(self) -> str:
        """The secret of a token that may do everything."""
        return admin_token(self._config)

    def client(self, token: str | None = None) -> httpx.Client:
        """An HTTP client with a token, by default one that may do everything; the caller closes it."""
        headers = {"Authorization": f"Bearer {token or self.admin}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60)

    def stranger(self) -> httpx.Client:
        """An HTTP client without a token; the caller closes it."""
        return httpx.Client(base_url=self.url, timeout=60)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        for listening in self._sockets:
            listening.close()


@pytest.fixture
def config(config: Config) -> Config:
    """The run's settings, with which the stand-in for a worker counts as alive however long a test takes."""
    return config.model_copy(update={"lease_s": 3600.0})


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Serve a fleet; as often as the test likes."""
    running: list[Served] = []

    def start(config: Config, path: Path | None = None) -> Served:
        running.append(Served(config, path))
        return running[-1]

    yield start
    for served in running:
        served.close()


@pytest.fixture
def http(serve: Callable[[Config], Served], config: Config, worker_id: UUID) -> Iterator[httpx.Client]:
    """A client of a served fleet with one live CPU worker, which does nothing by itself."""
    with serve(config).client() as client:
        yield client


@pytest.fixture
def token(engine: Engine) -> Callable[..., str]:
    """Makes tokens; returns the secret."""

    def make(*scopes: str) -> str:
        return tokens.create(engine, f"a {' '.join(scopes)} one", [tokens.Scope(scope) for scope in scopes])[1]

    return make


def measured(median_ms: float) -> Measurement:
    """A time as a judge would take it."""
    spread = {"q1_ms": 0.9, "q3_ms": 1.1, "mean_ms": 1.0, "min_ms": 0.8, "max_ms": 2.0}
    return Measurement(
        basis="cpu_clock",
        count=100,
        median_ms=median_ms,
        **{name: factor * median_ms for name, factor in spread.items()},
        std_ms=0.01,
        null_ms=0.002,
        cold_l2=True,
    )


def passed() -> Outcome:
    """The outcome of a right kernel, twice as fast as the reference."""
    return Outcome(
        category=Category.PASSED,
        runtime=measured(0.5),
        baseline=measured(1.0),
        log="hello\n",
        evidence=Evidence(durations_s={"check": 0.1}),
    )


def end(engine: Engine, worker_id: UUID, identity: UUID, outcome: Outcome | None = None) -> bool:
    """End an evaluation as a worker would; False if it is not there to be judged."""
    claimed = evaluations.claim(engine, identity, worker_id=worker_id, lease_s=30)
    if claimed is None:
        return False
    facts = {"device": "test device", "torch": "2.13", "python": "3.11", "host": "here"}
    evaluations.set_environment(engine, claimed.attempt_id, facts)
    evaluations.finish(engine, identity, claimed.number, outcome or passed(), written_by="judge", retry_delay_s=0)
    return True


@contextmanager
def worker_that_passes_all(engine: Engine, worker_id: UUID) -> Generator[None]:
    """Whatever is queued passes, in the background."""
    over = threading.Event()
    queued = text("SELECT id FROM evaluations WHERE state = 'queued' AND available_at <= now()")

    def run() -> None:
        while not over.wait(0.02):
            with engine.connect() as connection:
                ids = connection.scalars(queued).all()
            for identity in ids:
                end(engine, worker_id, identity)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.fixture
def judge(engine: Engine, worker_id: UUID) -> Callable[..., None]:
    """Ends an evaluation as a worker would."""

    def one(identity: UUID | str, outcome: Outcome | None = None) -> None:
        assert end(engine, worker_id, UUID(str(identity)), outcome)

    return one


@pytest.fixture
def judging(engine: Engine, worker_id: UUID) -> Iterator[None]:
    """A worker that passes whatever is queued."""
    with worker_that_passes_all(engine, worker_id):
        yield
