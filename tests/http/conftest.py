"""The HTTP server on a real port of loopback, in front of real services; a stand-in judges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from sqlalchemy import Engine

from kqueue.config import Config
from kqueue.contract import Outcome
from kqueue.store import tokens
from tests.http.standin import Served, end, worker_that_passes_all


@pytest.fixture
def config(config: Config) -> Config:
    """The run's settings, with which the stand-in for a worker counts as alive however long a test takes."""
    return config.model_copy(update={"lease_s": 3600.0})


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Serve a fleet; as often as the test likes."""
    running: list[Served] = []

    def start(config: Config, path: Path | None = None, **limits: Any) -> Served:
        running.append(Served(config, path, **limits))
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
