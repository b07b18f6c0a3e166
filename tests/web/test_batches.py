"""Batches."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from urllib.parse import quote

import httpx

from kqueue.categories import Category
from kqueue.evidence import Evidence
from kqueue.web import batches
from tests.http.standin import Served
from tests.samples import ended, request_fields
from tests.web.reading import HOSTILE, drawn, judged, shown, took

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
    assert drawn(browser, page) == 2
    assert [row["batch"] for row in csv.DictReader(io.StringIO(browser.get("/batches/step%2F1?format=csv").text))] == [
        "step/1"
    ] * 3
    shown(browser, "/batches/nobody", 404)


def test_the_cost_of_a_large_batch_is_added_up_if_asked_for(served, browser, judge, monkeypatch) -> None:
    """The sum is computed on request only, because it reads all attempts."""
    judged(served, judge, batch="large")
    monkeypatch.setattr(batches, "_CHEAP", 0)
    assert "slot time" not in shown(browser, "/batches/large")
    assert "slot time" in shown(browser, "/batches/large?cost=true")


def test_a_duel_has_its_state(served: Served, browser: httpx.Client, judge: Judge) -> None:
    """The page of a duel's batch names the winner and which kernel is which."""
    b = {"kernel": "class ModelNew: b", "backend": "torch", "kernel_label": f"b {HOSTILE}"}
    with served.client() as api:
        begun = api.post("/v1/duels", json={"a": request_fields(kernel_label="first one"), "b": b}).raise_for_status()
        batch = f"duel-{begun.json()['id']}"
        for row in api.get("/v1/evaluations", params={"batch": batch}).json()["evaluations"]:
            judge(row["evaluation_id"], ended(Category.CRASHED) if row["kernel_label"] == "first one" else took(0.5))
    page = shown(browser, f"/batches/{batch}")
    assert "B wins, because A ended as crashed" in page
    assert "first one and b " in page


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
    page = shown(browser, f"/batches/{quote(name, safe='')}")
    assert drawn(browser, page) == 2


def test_a_batch_in_which_nothing_has_ended(served: Served, browser: httpx.Client) -> None:
    """It has no estimate, and no division by zero."""
    with served.client() as api:
        api.post("/v1/evaluations", json=request_fields(batch="new")).raise_for_status()
    page = shown(browser, "/batches/new")
    assert "unknown: none ended" in page
    assert drawn(browser, page) == 2
