"""The costs of evaluations on the page."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from uuid import UUID, uuid4

import httpx
from sqlalchemy import Engine

from kqueue.evidence import Evidence
from kqueue.states import Spent
from kqueue.store import tokens
from kqueue.store.budgets import Budget
from tests.http.standin import Served
from tests.samples import passed, request_fields
from tests.store.steps import change
from tests.web.reading import HOSTILE, Elements, judged, shown

Judge = Callable[..., None]


def test_costs_load_by_themselves(served: Served, browser: httpx.Client, judge: Judge, engine: Engine) -> None:
    """Costs are summed by token with name and budget, batch, problem, lane and day, and rows link to their subjects."""
    made, secret = tokens.create(
        engine, HOSTILE, [tokens.Scope("problems")], budget=Budget(3600.0, 86400.0, Spent.REFUSE)
    )
    with served.client(secret) as http:
        answer = http.post("/v1/evaluations", json={**request_fields(uuid4().int), "batch": "step/1"})
    evidence = Evidence(durations_s={"alone_measure": 90.0, "check": 1.0}, cpu_s={"judge": 30.0})
    judge(UUID(answer.raise_for_status().json()["evaluation_id"]), passed(evidence=evidence))
    judged(served, judge, problem_label=HOSTILE)
    costly = "UPDATE attempts SET started_at = ended_at - interval '600 s' WHERE payer = :payer"
    change(engine, costly, payer=f"token:{made.id}")
    page = shown(browser, "/cost")
    assert "<table" not in page
    assert Elements(page).all("div", "data-later") == ["/cost?by=producer"]
    page = shown(browser, "/cost?by=producer&since=2d")
    for told in (f"/evaluations?producer=token%3A{made.id}", "3000 s left, then refuse", "1 min 30 s", "30 s"):
        assert told in page, told
    links = {"batch": "/batches/step%2F1", "problem": "/problems?name=", "lane": "/evaluations?lane=cpu", "day": ""}
    for by, link in links.items():
        page = shown(browser, f"/cost?by={by}")
        rows = page.split("<tbody>")[1].split("</tbody>")[0]
        assert not link or any(link in one for one in Elements(rows).all("a", "href")), by
        assert "budget" not in page
    assert "No evaluation has finished" in shown(browser, "/cost?by=lane&since=2099-01-01")
    rows = list(csv.DictReader(io.StringIO(browser.get("/cost?by=batch&format=csv").text)))
    assert [(row["key"], row["evaluations"], row["alone_s"]) for row in rows] == [
        ("step/1", "1", "90.0"),
        ("", "1", "0.0"),
    ]
    for wrong in ("by=x", "by=lane&since=x", "by=lane&since=%00"):
        shown(browser, f"/cost?{wrong}", 422)
