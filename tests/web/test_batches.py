"""Batches."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from urllib.parse import quote

import httpx
import pytest
from sqlalchemy import Engine

from kqueue.categories import Category
from kqueue.contract import Outcome
from kqueue.evidence import Evidence
from kqueue.store import tokens
from kqueue.store.reports.changes import Change, changes
from kqueue.web import batches
from tests.http.standin import Served
from tests.samples import ended, request_fields, timed
from tests.store.steps import change
from tests.web.reading import HOSTILE, Elements, drawn, judged, shown, took
from tests.web.visiting import visitor

Judge = Callable[..., None]


def test_a_batch_with_what_came_of_it(served: Served, browser: httpx.Client, judge: Judge) -> None:
    """A batch has progress with an estimate, categories, fast_p, the best kernel, failures by blame, and the cost."""
    worked = Evidence(cpu_s={"judge": 0.5, "candidate": 2.0})
    judged(served, judge, took(0.4).model_copy(update={"evidence": worked}), batch="step/1", kernel_label="good one")
    failed = judged(served, judge, ended(Category.CRASHED, message="it fell over"), batch="step/1")
    with served.client() as api:
        api.post("/v1/evaluations", json=request_fields(problem="class Model: x", batch="step/1")).raise_for_status()
    page = shown(browser, "/batches/step%2F1")
    for told in ("2 of 3", "about 5 min", "2.50x", "good one", "it fell over", f"/evaluations/{failed}", "1 of 2"):
        assert told in page, told
    assert "candidate 1" in page
    assert "slot time" in page
    assert "<dt>CPU time</dt><dd>2.5 s</dd>" in page
    assert drawn(browser, page) == 1
    rows = csv.DictReader(io.StringIO(browser.get("/batches/step%2F1?format=csv").text))
    assert [row["batch"] for row in rows] == ["step/1"] * 3
    shown(browser, "/batches/nobody", 404)


def test_the_cost_of_a_large_batch_is_added_up_if_asked_for(served, browser, judge, monkeypatch) -> None:
    """The page loads the sum later, because it reads all attempts."""
    judged(served, judge, batch="large")
    monkeypatch.setattr(batches, "_CHEAP", 0)
    page = shown(browser, "/batches/large")
    assert "slot time" not in page
    assert Elements(page).all("div", "data-later") == ["/batches/large?cost=true"]
    assert "slot time" in shown(browser, "/batches/large?cost=true")


def test_batches_are_listed(served: Served, browser: httpx.Client, judge: Judge) -> None:
    """The latest is first. Names are filtered by their beginning, hostile ones are escaped, and CSV is offered."""
    judged(served, judge, batch="b-1")
    judged(served, judge, batch=f"={HOSTILE}")
    page = shown(browser, "/batches")
    assert page.index("&lt;script&gt;") < page.index("b-1")
    assert "&lt;script&gt;" not in shown(browser, "/batches?name=b-")
    assert "No batch matches" in shown(browser, "/batches?name=%25")
    rows = list(csv.DictReader(io.StringIO(browser.get("/batches?format=csv").text)))
    assert [row["name"][:4] for row in rows] == ["'=\">", "b-1"]


def test_a_batch_with_a_hostile_name(served: Served, browser: httpx.Client, judge: Judge) -> None:
    """Its page, charts and links work, and its name is escaped."""
    name = f"a/b?c#d%2F..&{HOSTILE}"
    judged(served, judge, took(0.5), batch=name)
    assert drawn(browser, shown(browser, f"/batches/{quote(name, safe='')}")) == 1


def test_a_batch_in_which_nothing_has_ended(served: Served, browser: httpx.Client) -> None:
    """It has no estimate, and no division by zero."""
    with served.client() as api:
        api.post("/v1/evaluations", json=request_fields(batch="new")).raise_for_status()
    page = shown(browser, "/batches/new")
    assert "unknown: none ended" in page
    assert drawn(browser, page) == 1


def test_two_batches_are_compared(
    served: Served, browser: httpx.Client, judge: Judge, engine: Engine, token: Callable[..., str]
) -> None:
    """The page shows changes, speedups by problem and a mean, to their owner only. Equal kernels are never faster."""
    wrong = ended(Category.WRONG_VALUES, message=f"now wrong {HOSTILE}")
    results: dict[str, tuple[Outcome, Outcome]] = {
        "broke": (timed(0.5), wrong),
        "fixed": (wrong, timed(0.5)),
        "slower": (timed(0.25), timed(0.5)),
        "faster": (timed(0.5), timed(0.125)),
        "same": (timed(0.5), timed(0.125)),
        "wrong": (wrong, wrong),
        "not judged": (timed(0.5), ended(Category.REFERENCE_ERROR)),
    }
    for name, pair in results.items():
        for batch, outcome in zip("ab", pair, strict=True):
            kernel = "class ModelNew: " + ("the same" if name == "same" else batch)
            fields = {"problem": f"class Model: {name!r}", "problem_label": name, "kernel": kernel}
            judged(served, judge, outcome, batch=batch, **fields)
    # Kernels without common labels are compared by the best one of the problem.
    for batch, label, ms in (("a", "one", 0.5), ("a", "two", 0.25), ("b", "three", 0.25)):
        fields = {"kernel": f"class ModelNew: {label}", "problem": "class Model: 1"}
        judged(served, judge, took(ms), batch=batch, kernel_label=label, **fields)
    judged(served, judge, batch="a", problem="class Model: 2")
    page = shown(browser, "/compare?first=a&second=b")
    of_both = "1 of the first, 0 of the second"
    for told in ("<strong>2</strong> same", "now wrong &#34;", of_both, "0.50x", "4.00x (3.50x to 4.57x)"):
        assert told in page, told
    found = changes(engine, "a", "b")
    assert found.counts == {Change.SAME: 2, **{Change(name): 1 for name in results if name != "same"}}
    assert all(pair.change == pair.second.problem_label for pair in found.pairs if pair.second.problem_label)
    assert found.mean == pytest.approx(2 ** (1 / 3))
    assert "Compare two batches" in shown(browser, "/compare")
    matrix = shown(browser, "/matrix")
    columns = [matrix.index(f'<th scope="col">{name}</th>') for name in ("problem", "b", "a")]
    assert columns == sorted(columns)
    cells = re.findall(r'href="/evaluations\?batch=([ab])&amp;[^"]*">([^<]*)</a> <span class="dim">([^<]*)<', matrix)
    # These are of "broke", the first label.
    assert cells[:2] == [("b", "none right", "0/1"), ("a", "2.00x (1.75x to 2.28x)", "1/1")]
    assert ("a", "4.00x", "2/2") in cells
    assert "/compare" in Elements(shown(browser, "/batches/a")).all("form", "action")
    shown(browser, "/compare?first=a&second=none", 404)
    with visitor(served, tokens.create(engine, "of bob", (tokens.Scope.READ,), owner="bob")[1]) as bob:
        shown(bob, "/compare?first=a&second=b", 404)
        assert "No batch with a verdict matches" in shown(bob, "/matrix")
        assert Elements(shown(bob, "/compare")).all("option", "value") == []
        assert "<strong>0</strong> verdicts" in shown(bob, "/days")


def test_days_have_throughput_and_pass_rate(
    served: Served, browser: httpx.Client, judge: Judge, engine: Engine
) -> None:
    """Each day has its verdicts and the share of right kernels among the judged ones."""
    for outcome in (took(0.5), ended(Category.CRASHED), ended(Category.CRASHED), ended(Category.REFERENCE_ERROR)):
        judged(served, judge, outcome, batch="b/1")
    old = judged(served, judge, batch="c")
    # Midnight can pass before the page is read, which then has one more day.
    at = datetime.now(UTC)
    moved = "UPDATE summaries SET finished_at = :at WHERE evaluation_id = :id OR NOT :one"
    change(engine, moved, at=at, id=old, one=False)
    change(engine, moved, at=at - timedelta(days=20), id=old, one=True)
    rows = list(csv.DictReader(io.StringIO(browser.get("/days?format=csv").text)))
    assert len(rows) in (21, 22)
    rows = rows[:21]
    assert [row["day"] for row in rows] == [str(at.date() - timedelta(days=ago)) for ago in range(20, -1, -1)]
    assert [(row["passed"], row["failed"], row["not_judged"]) for row in (rows[0], rows[1], rows[-1])] == [
        ("1", "0", "0"),
        ("0", "0", "0"),
        ("1", "2", "1"),
    ]
    assert "33%" in shown(browser, "/days?batch=b/")
    assert "<strong>1</strong> verdicts" in shown(browser, "/days?batch=c")
    assert "<strong>4</strong> verdicts" in shown(browser, "/days?since=1d")
    shown(browser, "/days?since=never", 422)
