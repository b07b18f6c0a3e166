"""`kqueue mcp --http` before `kqueue serve`, both in this process, in front of real services; a stand-in judges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, text

from kqueue.config import Config
from kqueue.contract import Outcome
from kqueue.store import tokens
from tests.http.standin import Served, end
from tests.mcp.agents import Here


@pytest.fixture
def config(config: Config) -> Config:
    """The run's settings, with which the stand-in for a worker counts as alive however long a test takes."""
    return config.model_copy(update={"lease_s": 3600.0})


@pytest.fixture
def api(config: Config, worker_id: UUID) -> Iterator[Served]:
    """A served fleet with one live CPU worker, which does nothing by itself."""
    served = Served(config)
    yield served
    served.close()


@pytest.fixture
def here(api: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    """The tools of that fleet over HTTP, in this process."""
    monkeypatch.setenv("KQUEUE_URL", api.url)
    with Here() as serving:
        yield serving


@pytest.fixture
def token(engine: Engine) -> Callable[..., str]:
    """Makes tokens; returns the secret."""

    def make(scope: str = "problems", **more: Any) -> str:
        return tokens.create(engine, f"a {scope} one", [tokens.Scope(scope)], **more)[1]

    return make


@pytest.fixture
def judged(engine: Engine, worker_id: UUID) -> Callable[..., None]:
    """Ends an evaluation as a worker would."""

    def one(identity: UUID | str, outcome: Outcome | None = None) -> None:
        assert end(engine, worker_id, UUID(str(identity)), outcome)

    return one


@pytest.fixture
def queued(engine: Engine) -> Callable[[], list[str]]:
    """The ids of the evaluations that wait, the oldest first."""

    def look() -> list[str]:
        with engine.connect() as connection:
            found = connection.scalars(text("SELECT id FROM evaluations WHERE state = 'queued' ORDER BY submitted_at"))
            return [str(identity) for identity in found]

    return look
