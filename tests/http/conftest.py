"""The HTTP server on a real port of loopback, in front of real services; a stand-in judges."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

import httpx
import pytest
from sqlalchemy import Engine

from tests.http.fixtures import *  # noqa: F403
from tests.http.standin import Served, worker_that_passes_all


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    """A client of the server that may do everything."""
    with served.client() as client:
        yield client


@pytest.fixture
def judging(engine: Engine, worker_id: UUID) -> Iterator[None]:
    """A worker that passes whatever is queued."""
    with worker_that_passes_all(engine, worker_id):
        yield
