"""The spans of an evaluation, from its history."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

from kqueue.categories import Blame, Category
from kqueue.states import Priority, Writer
from kqueue.store.reports import Course, Try
from tests.traces.collector import Span, read
from workers.traces import Traces

BEGAN = datetime(2026, 1, 31, tzinfo=UTC)
#: The protocol's number of a failed span.
ERROR = 2
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def at(seconds: float) -> datetime:
    return BEGAN + timedelta(seconds=seconds)


def attempt(number: int, begin: float, end: float | None, category: Category | None, **more: Any) -> Try:
    fields: dict[str, Any] = {"written_by": Writer.JUDGE, "handed_back": False, "begun_s": {}, "durations_s": {}} | more
    return Try(number, "cpu-0@here", "here", "cpu", at(begin), None if end is None else at(end), category, **fields)


_SECOND: dict[str, Any] = {"begun_s": {"check": 1, "reference": 0.25, "time": 2.5, "cut off": 0.1}}
_SECOND |= {"durations_s": {"reference": 0.5, "check": 1.25, "time": 9.0}}
_KNOWN: dict[str, Any] = {
    "evaluation_id": UUID(int=7),
    "traceparent": PARENT,
    "owner": "local",
    "lane": "cpu",
    "device": "a CPU",
}
_KNOWN |= {"priority": Priority.BATCH, "backend": "torch", "submitted_at": at(0), "finished_at": at(6)}
_KNOWN |= {"category": Category.PASSED, "blame": Blame.NONE, "written_by": Writer.JUDGE, "reused": False}
_FIRST = attempt(1, 1, 2, Category.WORKER_LOST, written_by=Writer.WORKER)
COURSE = Course(**_KNOWN, tries=(_FIRST, attempt(2, 3, 6, Category.PASSED, **_SECOND)))


def told(course: Course) -> list[Span]:
    """Return the evaluation's spans in their form at a collector."""
    return read(encode_spans(Traces().of(course)).SerializeToString())


def times(span: Span) -> tuple[float, float]:
    """Return the begin and end of a span in seconds after the submission."""
    zero = int(BEGAN.timestamp()) * 10**9
    return (span.begin_ns - zero) / 1e9, (span.end_ns - zero) / 1e9


def test_an_evaluation_of_two_attempts() -> None:
    """Waits and attempts are below the evaluation, steps below their attempt, each with its times."""
    spans = told(COURSE)
    names = {span.identity: span.name for span in spans}
    assert len(names) == len(spans)
    assert {span.trace for span in spans} == {PARENT.split("-")[1]}
    assert [(span.name, names.get(span.above, span.above), times(span)) for span in spans] == [
        ("evaluation", PARENT.split("-")[2], (0, 6)),
        ("queue", "evaluation", (0, 1)),
        ("attempt 1", "evaluation", (1, 2)),
        ("queue", "evaluation", (2, 3)),
        ("attempt 2", "evaluation", (3, 6)),
        ("reference", "attempt 2", (3.25, 3.75)),
        ("check", "attempt 2", (4, 5.25)),
        ("time", "attempt 2", (5.5, 6)),  # never longer than its attempt
    ]


def test_what_the_spans_say() -> None:
    """Spans have the verdict and the places, and an error only if the fleet failed."""
    root, _, lost, _, passed, *_ = spans = told(COURSE)
    told_of_all = {"evaluation.id": str(COURSE.evaluation_id), "category": "passed", "blame": "none", "lane": "cpu"}
    told_of_all |= {"priority": "batch", "backend": "torch", "device": "a CPU", "reused": False, "attempts": 2}
    told_of_all |= {"recorded_by": "judge", "owner": "local"}
    assert root.attributes == {
        f"kqueue.{name}": value for name, value in (told_of_all | {"recorded_by": "judge"}).items()
    }
    told_of_one = {"attempt.number": 1, "worker": "cpu-0@here", "device.id": "cpu", "category": "worker_lost"}
    told_of_one |= {"blame": "fleet", "recorded_by": "worker", "handed_back": False}
    assert lost.attributes == {f"kqueue.{name}": value for name, value in told_of_one.items()} | {"host.name": "here"}
    assert [span.name for span in spans if span.status == ERROR] == ["attempt 1"]
    assert passed.attributes["kqueue.category"] == "passed"
    given_up = told(replace(COURSE, category=Category.WORKER_LOST, blame=Blame.FLEET, tries=COURSE.tries[:1]))
    assert [span.name for span in given_up if span.status == ERROR] == ["evaluation", "attempt 1"]
    handed_back = replace(COURSE.tries[0], handed_back=True)
    assert [span.name for span in told(replace(COURSE, tries=(handed_back,))) if span.status == ERROR] == []


def test_without_a_producer_s_span_the_evaluation_begins_a_trace() -> None:
    """The trace's id follows from the evaluation's, so a repetition is the same."""
    course = replace(COURSE, traceparent=None)
    spans = told(course)
    assert spans == told(course)
    assert spans[0].above == ""
    assert {span.trace for span in spans} == {course.evaluation_id.hex}
    other = told(replace(course, evaluation_id=UUID(int=8)))
    assert not {span.identity for span in spans} & {span.identity for span in other}
    assert told(replace(COURSE, traceparent="x" * 1000)) == spans


def test_what_is_never_begun_waits_until_its_end() -> None:
    """Reused, cancelled and expired evaluations have no attempt, except a cancelled one that still runs."""
    reused = told(replace(COURSE, reused=True, tries=()))
    assert [(span.name, times(span)) for span in reused] == [("evaluation", (0, 6)), ("queue", (0, 6))]
    assert reused[0].attributes["kqueue.reused"] is True
    running = attempt(1, 1, None, None, written_by=None)
    cancelled = told(replace(COURSE, category=Category.CANCELLED, blame=Blame.NOBODY, tries=(running,)))
    assert [(span.name, times(span)) for span in cancelled][2:] == [("attempt 1", (1, 6))]
    assert "kqueue.category" not in cancelled[2].attributes


def test_who_began_the_trace_decides_whether_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default the parent's sampling flag decides. OpenTelemetry's variables override it and the service's name."""
    unsampled = replace(COURSE, traceparent=f"{PARENT[:-2]}00")
    assert told(unsampled) == []
    assert {span.service for span in told(COURSE)} == {"kqueue"}
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "judges")
    assert {span.service for span in told(unsampled)} == {"judges"}
