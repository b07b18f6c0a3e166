"""The HTTP server on a real port of loopback, in front of real services; a stand-in judges."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.http.fixtures import *  # noqa: F403
from tests.http.standin import Served


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    """A client of the server that may do everything."""
    with served.client() as client:
        yield client
