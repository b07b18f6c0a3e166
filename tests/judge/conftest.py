"""Fixture that ends the references which tests of this folder run in threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.judge import loopback


@pytest.fixture(autouse=True)
def _end_loopbacks() -> Iterator[None]:
    yield
    while loopback.running:
        loopback.running.pop().close()
