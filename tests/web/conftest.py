"""The fleet's page on a real port of loopback, in front of real services; a stand-in judges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import httpx
import pytest
from sqlalchemy import Engine

from kqueue.config import Config
from kqueue.contract import Outcome
from kqueue.store import tokens
from kqueue.web.app import create_app
from tests.http.standin import Served, end, submit
from tests.web.visiting import visitor


@pytest.fixture
def config(config: Config) -> Config:
    """The run's settings, with which the stand-in for a worker counts as alive however long a test takes."""
    return config.model_copy(update={"lease_s": 3600.0})


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Serve a fleet with its page; as often as the test likes."""
    running: list[Served] = []

    def start(config: Config, **limits: Any) -> Served:
        running.append(Served(config, make=create_app, **limits))
        return running[-1]

    yield start
    for served in running:
        served.close()


@pytest.fixture
def served(serve: Callable[[Config], Served], config: Config, worker_id: UUID) -> Served:
    """A served fleet with one live CPU worker, which does nothing by itself."""
    return serve(config)


@pytest.fixture
def token(engine: Engine) -> Callable[[str], str]:
    """Makes tokens of a scope; returns the secret."""

    def make(scope: str) -> str:
        return tokens.create(engine, f"a {scope} one", [tokens.Scope(scope)])[1]

    return make


@pytest.fixture
def browser(served: Served, token: Callable[[str], str]) -> Iterator[httpx.Client]:
    """A browser that is logged in to look and submit."""
    with visitor(served, token("submit")) as client:
        yield client


@pytest.fixture
def queued(served: Served) -> UUID:
    """An evaluation that waits."""
    with served.client() as api:
        return submit(api, 0)


@pytest.fixture
def judge(engine: Engine, worker_id: UUID) -> Callable[..., None]:
    """Ends an evaluation as a worker would."""

    def one(identity: UUID, outcome: Outcome | None = None) -> None:
        assert end(engine, worker_id, identity, outcome)

    return one
