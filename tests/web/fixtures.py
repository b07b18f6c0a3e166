"""The fleet's page on a loopback port, with real services and a stand-in for the worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from uuid import UUID

import httpx
import pytest
from fastapi import FastAPI

from kqueue.web.app import create_app
from tests.http.fixtures import *  # noqa: F403
from tests.http.standin import Served, submit
from tests.web.browsing import *  # noqa: F403
from tests.web.visiting import visitor


@pytest.fixture(scope="module")
def application() -> Callable[..., FastAPI]:
    return create_app


@pytest.fixture
def browser(served: Served, token: Callable[..., str]) -> Iterator[httpx.Client]:
    """A browser that is logged in with the scope `submit`."""
    with visitor(served, token("submit")) as client:
        yield client


@pytest.fixture
def queued(served: Served) -> UUID:
    with served.client() as api:
        return submit(api, 0)
