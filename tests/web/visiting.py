"""Visitors of a fleet's page for tests."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import httpx

from tests.http.standin import Served

#: Headers that a browser sends with a form of the page itself, and with a visit.
OWN_FORM = {"Sec-Fetch-Site": "same-origin"}
HTML = {"Accept": "text/html,application/xhtml+xml"}


def stranger(served: Served) -> httpx.Client:
    """Return a browser that is not logged in. The caller closes it."""
    return httpx.Client(base_url=served.url, headers=HTML, timeout=60)


def enter(client: httpx.Client, token: str, **fields: Any) -> httpx.Response:
    """Log in by the form, and return the answer."""
    return client.post("/login", data={"token": token, **fields}, headers=OWN_FORM)


@contextmanager
def visitor(served: Served, token: str) -> Generator[httpx.Client]:
    """Open a browser that is logged in."""
    with stranger(served) as client:
        assert enter(client, token).status_code == 200
        yield client
