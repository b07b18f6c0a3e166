"""`kqueue mcp --http` before `kqueue serve`, both in this process, in front of real services; a stand-in judges."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Engine, text

from tests.http.fixtures import *  # noqa: F403
from tests.http.standin import Served
from tests.mcp.agents import Here


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
    """Those tools, before a fleet with one live CPU worker."""
    return tools


@pytest.fixture
def queued(engine: Engine) -> Callable[[], list[str]]:
    """The ids of the evaluations that wait, the oldest first."""

    def look() -> list[str]:
        with engine.connect() as connection:
            found = connection.scalars(text("SELECT id FROM evaluations WHERE state = 'queued' ORDER BY submitted_at"))
            return [str(identity) for identity in found]

    return look
