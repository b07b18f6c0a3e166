"""The page in a real browser: keyboard, assistive technology, phone size, and live updates."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine

from kqueue.categories import Category
from tests.http.standin import Served, submit
from tests.samples import ended, examined, request_fields
from tests.store.steps import lasting_worker
from tests.web.browsing import NEEDS_CHROMIUM, violations
from tests.web.reading import judged, search, took

pytestmark = NEEDS_CHROMIUM


def _log_in(tab: Any, secret: str) -> Any:
    tab.goto("/login")
    tab.fill("#token", secret)
    tab.press("#token", "Enter")
    tab.wait_for_url(re.compile(r"/$"))
    return tab


@pytest.mark.nightly
def test_by_keyboard_alone(visit, token, queued: UUID, judge) -> None:
    judge(queued, ended(Category.WRONG_VALUES))
    tab = visit()
    tab.goto("/evaluations")
    # The field of the form has the focus.
    tab.keyboard.type(token("read"))
    tab.keyboard.press("Enter")
    tab.wait_for_url("**/evaluations")
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.className") == "skip"
    for _ in range(60):
        tab.keyboard.press("Tab")
        if tab.evaluate("document.activeElement.getAttribute('href')") == f"/evaluations/{queued}":
            break
    # The focused element is visibly outlined.
    assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    tab.keyboard.press("Enter")
    tab.wait_for_url(f"**/evaluations/{queued}")
    assert tab.locator("h2", has_text="Wrong values").count() == 1


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(visit, served: Served, token, judge, scheme: str) -> None:
    with served.client() as api:
        waits, wrong, right = (submit(api, number) for number in range(3))
    judge(wrong, ended(Category.WRONG_VALUES, log="hello\n"))
    judge(right, examined("relu"))
    tab = visit(color_scheme=scheme)
    tab.goto("/login")
    pages = ["/", "/evaluations", "/evaluations?category=none", *(f"/evaluations/{one}" for one in (waits, wrong))]
    pages.append(f"/evaluations/{right}?against={wrong}")
    assert violations(tab) == []
    _log_in(tab, token("submit"))
    for address in pages:
        tab.goto(address)
        assert violations(tab) == [], address


@pytest.fixture
def addresses(served: Served, engine: Engine, judge: Callable[..., None]) -> list[str]:
    """Addresses of all lists, comparisons and searches, each with content."""
    good = judged(served, judge, took(0.4), batch="step/1", kernel_label="good one")
    bad = judged(served, judge, ended(Category.WRONG_VALUES, log="hello\n"), batch="step/1")
    one, other = search(engine, "alpha"), search(engine, "beta")
    lasting_worker(engine, "gpu", "GPU-0")
    judged(served, judge, examined("relu"), lane="gpu", settings={"examine": {"profile": True}})
    problem = hashlib.sha256(str(request_fields()["problem"]).encode()).hexdigest()
    lists = ["problems", f"problems/{problem}", "batches", "batches/step%2F1", "runs", "cost?by=producer"]
    lists += [
        "days",
        "matrix",
        "compare?first=step/1&second=step/1",
        "search?q=ModelNew",
        f"runs/{one.id}",
        f"runs/{one.id}/{other.id}",
        f"compare/{good}/{bad}",
    ]
    return [f"/{address}" for address in (*lists, f"evaluations/{bad}/autopsy", f"evaluations/{good}/autopsy")]


def test_news_come_without_a_reload(visit, served: Served, token, judge) -> None:
    with served.client() as api:
        first = submit(api, 1)
    tab = visit()
    wrong: list[str] = []
    tab.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    _log_in(tab, token("read"))
    tab.evaluate("window.mark = 1")
    tab.get_by_text("live", exact=True).wait_for()
    judge(first)
    tab.locator("h2", has_text="Latest verdicts").wait_for()
    assert tab.evaluate("window.mark") == 1
    with served.client() as api:
        second = submit(api, 2)
    tab.goto(f"/evaluations/{second}")
    assert tab.locator("h2", has_text="Verdict").count() == 0
    judge(second)
    tab.locator("h2", has_text="Verdict").wait_for()
    assert wrong == []


def test_lists_are_live_sorted_and_folded_on_phones(visit, served: Served, token, judge) -> None:
    """A new verdict comes in the order of the selected column, filters are folded on a phone, and costs load."""
    for label, ms in (("slow", 0.8), ("fast", 0.2), ("middle", 0.4)):
        judged(served, judge, took(ms), kernel_label=label)
    tab = _log_in(visit(viewport={"width": 390, "height": 844}), token("read"))
    wrong: list[str] = []
    tab.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.goto("/evaluations")
    tab.get_by_text("live", exact=True).wait_for()

    def kernels() -> list[str]:
        return tab.locator("tbody td:nth-child(5)").all_inner_texts()

    assert kernels() == ["middle", "fast", "slow"]
    tab.get_by_role("button", name="speedup").click()
    assert kernels() == ["fast", "middle", "slow"]
    judged(served, judge, took(0.5), kernel_label="late")
    tab.get_by_text("late", exact=True).wait_for()
    assert kernels() == ["fast", "middle", "late", "slow"]
    assert tab.get_by_role("columnheader", name="speedup").get_attribute("aria-sort") == "descending"
    speedup = tab.get_by_role("columnheader", name="speedup").bounding_box()
    assert speedup["x"] + speedup["width"] <= 390  # it needs no sideways scrolling
    assert not tab.locator("select[name=state]").is_visible()
    tab.get_by_text("Filters").click()
    assert tab.locator("select[name=state]").is_visible()
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert violations(tab) == []
    tab.goto("/cost")
    tab.get_by_role("columnheader", name="slot time").wait_for()
    assert wrong == []


@pytest.mark.nightly
def test_without_a_script(visit: Callable[..., Any], token: Callable[[str], str], queued: UUID) -> None:
    tab = _log_in(visit(java_script_enabled=False), token("submit"))
    tab.goto(f"/evaluations/{queued}")
    tab.get_by_role("button", name="Cancel").click()
    tab.get_by_text("cancelled").first.wait_for()
    tab.get_by_role("button", name="Log out").click()
    tab.wait_for_url("**/login")


@pytest.mark.nightly
class TestMore:
    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_axe_finds_nothing_on_other_pages(self, visit, token, addresses, scheme: str) -> None:
        tab = _log_in(visit(color_scheme=scheme), token("problems"))
        for address in addresses:
            assert tab.goto(address).status == 200, address
            assert violations(tab) == [], address
