"""`kqueue mcp --http` and `kqueue serve` in this process, with real services and a stand-in for the worker."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator

import pytest
from mcp import Client
from sqlalchemy import Engine, text

from tests.http.fixtures import *  # noqa: F403
from tests.http.standin import Served
from tests.mcp.agents import Here, over_http


@pytest.fixture(scope="module")
def tools(house: Served) -> Iterator[Here]:
    """The tools of the module's fleet over HTTP, in this process."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("KQUEUE_URL", house.url)
        serving = Here()
    with serving:
        yield serving


@pytest.fixture
def here(tools: Here, served: Served) -> Here:
    """The tools of a fleet with one live CPU worker."""
    return tools


@pytest.fixture
def mode() -> str:
    """The client's way to begin a session."""
    return "auto"


@pytest.fixture
async def client(here: Here, token: Callable[..., str], mode: str, anyio_backend: str) -> AsyncGenerator[Client]:
    """An agent's client with a token of the scope `problems`."""
    async with over_http(here.url, token(), mode=mode) as client:
        yield client


@pytest.fixture
def queued(engine: Engine) -> Callable[[], list[str]]:
    """Return the ids of the queued evaluations, the oldest first."""

    def look() -> list[str]:
        with engine.connect() as connection:
            found = connection.scalars(text("SELECT id FROM evaluations WHERE state = 'queued' ORDER BY submitted_at"))
            return [str(identity) for identity in found]

    return look
