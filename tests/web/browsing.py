"""A real browser for tests of the page."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.http.standin import Served

__all__ = ["chromium", "visit"]

_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
_FLAGS += ["--disable-component-update", "--disable-sync"]
_AXE = Path(__file__).parent / "axe" / "axe.min.js"
#: Timeout of each browser action on a busy machine in milliseconds.
_PATIENCE_MS = 120_000

NEEDS_CHROMIUM = pytest.mark.skipif(_CHROMIUM is None, reason="there is no chromium on PATH")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=_CHROMIUM, args=_FLAGS, timeout=_PATIENCE_MS)
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium: Any, served: Served) -> Iterator[Callable[..., Any]]:
    """Open a tab of a new visitor, who is not logged in."""
    contexts: list[Any] = []

    def one(**options: Any) -> Any:
        context = chromium.new_context(base_url=served.url, **options)
        context.set_default_timeout(_PATIENCE_MS)
        contexts.append(context)
        return context.new_page()

    yield one
    for context in contexts:
        context.close()


def violations(tab: Any) -> list[Any]:
    """Return the violations that axe finds."""
    # The page's policy allows the server's scripts only, but not for a debugger's evaluation.
    tab.evaluate(_AXE.read_text())
    return tab.evaluate(
        "axe.run().then(found => found.violations.map(one => [one.id, one.nodes.map(node => node.html)]))"
    )
