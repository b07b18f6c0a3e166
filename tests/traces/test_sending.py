"""Traces of ended evaluations in a real database, sent to a real collector."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SpanExportResult
from sqlalchemy import Engine, text

from kqueue.categories import Category
from kqueue.contract import Request
from kqueue.evidence import Evidence
from kqueue.states import Writer
from kqueue.store import evaluations
from tests.samples import ended, passed, request_fields
from tests.traces.collector import Collector
from workers import traces
from workers.traces import Follower

ROOT = Path(__file__).parents[2]
SECRET = "a line of nobody else's business"


@pytest.fixture
def follow(database_url: str, taking: Collector) -> Iterator[Callable[..., Follower]]:
    """Return a function that makes followers, which send to the collector and retry for a second."""
    made: list[Follower] = []
    exporter = OTLPSpanExporter(f"{taking.url}/v1/traces", timeout=1)

    def make(since: float | None = None) -> Follower:
        began = time.monotonic() if since is None else since
        made.append(
            Follower(database_url, lambda spans: exporter.export(spans) is SpanExportResult.SUCCESS, since=began)
        )
        return made[-1]

    yield make
    for one in made:
        one.release()


@pytest.fixture
def evaluate(engine: Engine, worker_id: UUID) -> Callable[..., UUID]:
    """Return a function that ends the attempts of an evaluation, the last one with the verdict."""

    def run(*outcomes: Any, number: int = 0) -> UUID:
        fields = request_fields(number, problem_label=SECRET, kernel_label=SECRET, batch=SECRET, producer=SECRET)
        fields |= {"problem": f"# {SECRET}", "kernel": f"# {SECRET} {number}", "idempotency_key": f"{SECRET} {number}"}
        [submitted] = evaluations.submit(engine, [Request(**fields)])
        for outcome in outcomes:
            claimed = evaluations.claim(engine, submitted.evaluation_id, worker_id=worker_id, lease_s=30)
            assert claimed is not None
            evaluations.finish(
                engine, claimed.evaluation_id, claimed.number, outcome, written_by=Writer.JUDGE, retry_delay_s=0
            )
        return submitted.evaluation_id

    return run


def roots(kept: Collector) -> list[str]:
    """Return the evaluations of received traces in order of arrival."""
    return [span.attributes["kqueue.evaluation.id"] for span in kept.spans if span.name == "evaluation"]


def test_what_the_record_holds_is_told(taking: Collector, follow, evaluate) -> None:
    """A trace has attempts with their workers and steps, and no text of a producer."""
    follower = follow()
    assert follower.look()
    steps = Evidence(begun_s={"check": 0.0}, durations_s={"check": 0.001})
    identity = evaluate(ended(Category.JUDGE_ERROR, evidence=steps), passed(evidence=steps, log=SECRET))
    assert follower.look()
    spans = taking.of(identity)
    names = {span.identity: span.name for span in spans}
    assert [(span.name, names.get(span.above)) for span in spans] == [
        ("evaluation", None),
        ("queue", "evaluation"),
        ("attempt 1", "evaluation"),
        ("check", "attempt 1"),
        ("queue", "evaluation"),
        ("attempt 2", "evaluation"),
        ("check", "attempt 2"),
    ]
    assert [span.attributes.get("kqueue.category") for span in spans if "attempt" in span.name] == [
        "judge_error",
        "passed",
    ]
    assert SECRET.encode() not in b"".join(taking.bodies)


def test_each_is_sent_once_and_by_one_host(taking: Collector, follow, evaluate) -> None:
    """Each trace is sent once, and a second follower continues from the first one's last progress."""
    before = evaluate(passed(), number=1)
    one, other = follow(), follow()
    assert one.look()
    ids = [evaluate(passed(), number=number) for number in (2, 3)]
    for follower in (one, other, one, other):
        assert follower.look()
    assert sorted(roots(taking)) == sorted(map(str, ids))
    one.release()
    ids.append(evaluate(passed(), number=4))
    for follower in (other, one, other):
        assert follower.look()
    assert sorted(roots(taking)) == sorted(map(str, ids))
    assert str(before) not in roots(taking)


def test_a_late_beginner_tells_what_ended_meanwhile(taking: Collector, follow, evaluate) -> None:
    """A late follower sends the evaluations that ended since its supervisor's start."""
    identity = evaluate(passed())
    assert follow(since=time.monotonic() - 60).look()
    assert roots(taking) == [str(identity)]


def test_a_collector_that_is_away_gets_what_is_young(taking: Collector, follow, evaluate, engine, monkeypatch) -> None:
    """Refused traces are sent once when the collector is back, except those that are too old by then."""
    monkeypatch.setattr(traces, "_FEW", 1)
    follower = follow()
    assert follower.look()
    old, young = (evaluate(passed(), number=number) for number in (1, 2))
    taking.status = 503
    assert not follower.look()
    assert taking.refused
    with engine.begin() as connection:
        age = text("UPDATE verdicts SET finished_at = finished_at - :age WHERE evaluation_id = :id")
        connection.execute(age, {"age": traces.KEPT + timedelta(minutes=1), "id": old})
    taking.status = 200
    for _ in range(2):
        assert follower.look()
    assert roots(taking) == [str(young)]


def test_postgres_may_restart(taking: Collector, follow, evaluate, server: Any, database_url: str) -> None:
    """After a lost connection the follower continues without a gap and stays the only one."""
    follower = follow()
    assert follower.look()
    first = evaluate(passed(), number=1)
    server.cut(database_url)
    with pytest.raises(traces.KqueueError):
        follower.look()
    second = evaluate(passed(), number=2)
    assert follower.look()
    assert sorted(roots(taking)) == sorted(map(str, (first, second)))
    assert follow().look()
    assert len(roots(taking)) == 2


def test_nobody_else_has_its_lock() -> None:
    """The follower's lock is held while a fleet runs, so each of the fleet's locks in Postgres has a unique number."""
    sources = [path.read_text() for folder in ("kqueue", "workers") for path in (ROOT / folder).rglob("*.py")]
    numbers = [number for source in sources for number in re.findall(r"= (0x6B71_7565_\w+)", source)]
    assert len(numbers) >= 2
    assert len(set(numbers)) == len(numbers)
