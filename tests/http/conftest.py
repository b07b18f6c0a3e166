"""The HTTP server on a loopback port, with real services and a stand-in for the worker."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.http.fixtures import *  # noqa: F403
from tests.http.standin import Served


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    """A client of the server with the scope `admin`."""
    with served.client() as client:
        yield client
