"""Fixtures of a served fleet, shared by the folders http, web and mcp, with a stand-in for the worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import Engine
from sqlalchemy.engine import make_url

from kqueue.config import Config, load
from kqueue.contract import Outcome
from kqueue.http.app import create_app
from kqueue.local.servers import Valkey
from kqueue.store import roles, tokens
from tests.http.standin import Served, end, worker_that_passes_all
from tests.services import Server

__all__ = [
    "application", "config", "database_url", "house", "http", "judge", "judging", "login", "serve", "served", "token",
]  # fmt: skip


@pytest.fixture(scope="module")
def application() -> Callable[..., FastAPI]:
    return create_app


@pytest.fixture(scope="module")
def house(
    server: Server, valkey: Valkey, tmp_path_factory: pytest.TempPathFactory, application: Callable[..., FastAPI]
) -> Iterator[Served]:
    """One server and one database for all tests of a module."""
    home, url = tmp_path_factory.mktemp("house"), server.clone()
    served = Served(
        load(database_url=url, redis_url=valkey.url, home=home, scratch=home, lease_s=3600), make=application
    )
    yield served
    served.close()
    server.drop(url)


@pytest.fixture
def database_url(house: Served) -> str:
    """The module's database, emptied."""
    return house.emptied()


@pytest.fixture
def config(config: Config) -> Config:
    """The settings of the run. The stand-in for a worker counts as alive for any length of a test."""
    return config.model_copy(update={"lease_s": 3600.0})


@pytest.fixture
def serve(application: Callable[..., FastAPI]) -> Iterator[Callable[..., Served]]:
    """Return a function that starts a server with other settings."""
    running: list[Served] = []

    def start(config: Config, path: Path | None = None, **limits: Any) -> Served:
        running.append(Served(config, path, **{"make": application, **limits}))
        return running[-1]

    yield start
    for served in running:
        served.close()


@pytest.fixture
def served(house: Served, worker_id: UUID) -> Served:
    """The module's server with one live CPU worker that judges nothing."""
    return house


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    """A client of the server with the scope `admin`."""
    with served.client() as client:
        yield client


@pytest.fixture
def login(server: Server, config: Config, engine: Engine) -> Iterator[str]:
    """The URL of a login that is a member of the gateway's role only."""
    name = f"gateway_{uuid4().hex[:8]}"
    roles.login(engine, name, roles.GATEWAY, "secret")
    yield make_url(config.require_database()).set(username=name, password="secret").render_as_string(False)
    server.cut(config.require_database())
    server.execute(f'DROP ROLE "{name}"')


@pytest.fixture
def token(engine: Engine) -> Callable[..., str]:
    """Return a function that creates a token and returns its secret."""

    def make(*scopes: str, **more: Any) -> str:
        wanted = scopes or ("problems",)
        return tokens.create(engine, f"a {' '.join(wanted)} one", [tokens.Scope(scope) for scope in wanted], **more)[1]

    return make


@pytest.fixture
def judge(engine: Engine, worker_id: UUID) -> Callable[..., None]:
    """Return a function that ends an evaluation like a worker."""

    def one(identity: UUID | str, outcome: Outcome | None = None) -> None:
        assert end(engine, worker_id, UUID(str(identity)), outcome)

    return one


@pytest.fixture
def judging(engine: Engine, worker_id: UUID) -> Iterator[None]:
    """Run a worker that passes every queued evaluation."""
    with worker_that_passes_all(engine, worker_id):
        yield
