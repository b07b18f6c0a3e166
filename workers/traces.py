"""``python -m workers.traces``: send a trace of each finished evaluation to a collector over OTLP/HTTP.

A trace is made after the verdict from records of trusted code in Postgres. No worker, judge or kernel takes part. A
trace that the collector refuses is sent again for some minutes, then dropped.

Only one process of the fleet sends, which holds a lock in Postgres. Ids derive from the evaluation's id, so a trace
that is sent twice, which a change of hosts can cause, is the same trace.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from importlib.metadata import version
from types import MappingProxyType
from typing import Any, Final
from uuid import UUID

import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import SpanContext, SpanKind, StatusCode, TraceFlags
from sqlalchemy import Connection, func, select

from kqueue import logs
from kqueue.categories import Blame
from kqueue.config import load
from kqueue.errors import DatabaseUnavailable, KqueueError, SchemaMismatch
from kqueue.store import engine as store_engine
from kqueue.store import reports
from kqueue.store.reports import Course, Try
from kqueue.tracing import Parent
from workers.exporter import SINCE_VARIABLE

_log: Any = structlog.get_logger(__name__)

#: Key of the advisory lock of the fleet's only sending process.
_LOCK: Final = 0x6B71_7565_7565_0005
_LOOK_EVERY_S: Final = 1.0
#: Seconds to wait after the collector refused traces, or Postgres was away.
_PAUSE_S: Final = 5.0
#: Age of an evaluation's end after which its trace is dropped.
KEPT: Final = timedelta(minutes=5)
#: Longest delay from a verdict's time to its commit. A verdict that is committed later has no trace.
_LATE: Final = timedelta(seconds=15)
#: Number of ids that are read at once, and of evaluations whose traces are sent at once.
_MANY: Final = 5000
_FEW: Final = 100
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_NONE: Final[Mapping[str, Any]] = MappingProxyType({})


class _Ids(IdGenerator):
    """A generator that returns the ids which were set before a span begins."""

    def __init__(self) -> None:
        self.trace_id = 0
        self.span_id = 0

    def generate_trace_id(self) -> int:
        """Return the next trace's id."""
        return self.trace_id

    def generate_span_id(self) -> int:
        """Return the next span's id."""
        return self.span_id


class _Ended(SpanProcessor):
    """A processor that collects the spans that have ended."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        """Collect a span."""
        self.spans.append(span)


class Traces:
    """The factory of evaluations' spans.

    It heeds ``OTEL_SERVICE_NAME``, ``OTEL_RESOURCE_ATTRIBUTES`` and ``OTEL_TRACES_SAMPLER``. By default it samples a
    trace if the producer sampled it.
    """

    def __init__(self) -> None:
        self._ids = _Ids()
        self._ended = _Ended()
        resource = Resource.create({SERVICE_NAME: "kqueue"}).merge(OTELResourceDetector().detect())
        provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        provider.add_span_processor(self._ended)
        self._tracer = provider.get_tracer("kqueue", version("kqueue"))

    def of(self, course: Course) -> list[ReadableSpan]:
        """Return an evaluation's spans. Empty if its trace is not sampled."""
        self._ids.trace_id = course.evaluation_id.int
        root = self._span(
            "evaluation",
            _above(course),
            (course.submitted_at, course.finished_at),
            kind=SpanKind.CONSUMER,
            failed=course.blame is Blame.FLEET,
            attributes={
                "kqueue.evaluation.id": str(course.evaluation_id),
                "kqueue.owner": course.owner,
                "kqueue.category": course.category.value,
                "kqueue.blame": course.blame.value,
                "kqueue.lane": course.lane,
                "kqueue.priority": course.priority.value,
                "kqueue.backend": course.backend,
                "kqueue.device": course.device,
                "kqueue.reused": course.reused,
                "kqueue.attempts": len(course.tries),
                "kqueue.recorded_by": course.written_by.value,
            },
        )
        since = course.submitted_at
        for number, one in enumerate(course.tries, start=1):
            self._span("queue", root, (since, one.started_at), path=f"queue {number}")
            since = one.ended_at or course.finished_at
            self._attempt(root, one, since)
        if not course.tries:
            self._span("queue", root, (since, course.finished_at), path="queue 1")
        made, self._ended.spans = self._ended.spans, []
        return made

    def _attempt(self, root: Context, one: Try, ended_at: datetime) -> None:
        name = f"attempt {one.number}"
        category = one.category
        attempt = self._span(
            name,
            root,
            (one.started_at, ended_at),
            failed=category is not None and category.blame is Blame.FLEET and not one.handed_back,
            attributes={
                "kqueue.attempt.number": one.number,
                "kqueue.worker": one.worker,
                "host.name": one.host,
                "kqueue.device.id": one.device,
                "kqueue.category": category and category.value,
                "kqueue.blame": category and category.blame.value,
                "kqueue.recorded_by": one.written_by and one.written_by.value,
                "kqueue.handed_back": one.handed_back,
            },
        )
        for step, begun_s in sorted(one.begun_s.items(), key=lambda item: item[1]):
            if (seconds := one.durations_s.get(step)) is None:
                continue
            begun_at = min(one.started_at + timedelta(seconds=begun_s), ended_at)
            until = min(begun_at + timedelta(seconds=seconds), ended_at)
            # A repeated step has one span, which begins with its first run and has the sum of the durations.
            self._span(step, attempt, (begun_at, until), path=f"{name}/{step}")

    def _span(
        self,
        name: str,
        above: Context,
        times: tuple[datetime, datetime],
        *,
        path: str | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        failed: bool = False,
        attributes: Mapping[str, Any] = _NONE,
    ) -> Context:
        """Make a span, and return the context for its children."""
        # The path is unique among the evaluation's spans. ``failed`` means an error of the fleet, not a wrong kernel.
        digest = sha256(f"{UUID(int=self._ids.trace_id)} {path or name}".encode()).digest()
        self._ids.span_id = int.from_bytes(digest[:8], "big") or 1
        span = self._tracer.start_span(
            name,
            above,
            kind,
            {key: value for key, value in attributes.items() if value is not None},
            start_time=_ns(times[0]),
        )
        if failed:
            span.set_status(StatusCode.ERROR)
        span.end(_ns(max(times)))
        return trace.set_span_in_context(span, Context())


def _above(course: Course) -> Context:
    """Return the context of the producer's span. It is empty without one, so that the evaluation begins a trace."""
    parent = Parent.read(course.traceparent)
    if parent is None:
        return Context()
    flags = TraceFlags(TraceFlags.SAMPLED if parent.sampled else TraceFlags.DEFAULT)
    span = SpanContext(parent.trace_id, parent.span_id, is_remote=True, trace_flags=flags)
    return trace.set_span_in_context(trace.NonRecordingSpan(span), Context())


def _ns(moment: datetime) -> int:
    return (moment - _EPOCH) // timedelta(microseconds=1) * 1000


class Follower:
    """The sender of finished evaluations' traces, while it holds the lock.

    Args:
        url: the database's URL.
        send: sends spans, and returns False if the collector refused them.
        since: monotonic time from which evaluations' ends count, at most :data:`KEPT` ago.
    """

    def __init__(self, url: str, send: Callable[[Sequence[ReadableSpan]], bool], *, since: float) -> None:
        self._engine = store_engine.connect(url, application="kqueue traces", pool_size=2)
        self._send = send
        self._begin = since
        self._traces = Traces()
        self._turn: Connection | None = None
        self._since: datetime | None = None
        #: The evaluations that ended after ``_since`` and were sent, with their ends.
        self._sent: dict[UUID, datetime] = {}

    def look(self) -> bool:
        """Send the traces of newly finished evaluations. Return False if the collector refused some.

        Raises:
            DatabaseUnavailable, SchemaMismatch: Postgres cannot be used now.
        """
        try:
            with store_engine.translate():
                now = self._mine()
        except (DatabaseUnavailable, SchemaMismatch):
            self.release()
            raise
        if now is None:
            return True
        assert self._since is not None
        if now - KEPT > self._since:
            self._since = now - KEPT
        for ids in self._ended(self._since):
            spans = [span for course in reports.courses(self._engine, ids) for span in self._traces.of(course)]
            if spans and not self._send(spans):
                return False
            self._sent |= ids
        self._since = max(self._since, now - _LATE)
        self._sent = {identity: at for identity, at in self._sent.items() if at > self._since}
        return True

    def release(self) -> None:
        """Release the lock, so that another process sends."""
        if self._turn is not None:
            with suppress(Exception):  # the connection can be broken
                self._turn.invalidate()
                self._turn.close()
        self._turn = None

    def _mine(self) -> datetime | None:
        """Return the time of the database's clock, or None if another process holds the lock."""
        if self._turn is not None:
            return self._turn.scalar(select(func.clock_timestamp()))
        connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        lock = select(func.clock_timestamp().label("now"), func.pg_try_advisory_lock(_LOCK).label("mine"))
        now, mine = connection.execute(lock).one()
        if not mine:
            connection.close()
            # The other process sends all traces until it is gone.
            self._since = now
            return None
        self._turn = connection
        if self._since is None:
            self._since = now - min(timedelta(seconds=max(time.monotonic() - self._begin, 0.0)), KEPT)
        return now

    def _ended(self, since: datetime) -> Iterator[dict[UUID, datetime]]:
        """Yield the evaluations that ended and were not sent, a few at a time."""
        after = since, UUID(int=0)
        while page := reports.finished(self._engine, after=after, limit=_MANY):
            new = [one for one in page if one[0] not in self._sent]
            for begin in range(0, len(new), _FEW):
                yield dict(new[begin : begin + _FEW])
            after = page[-1][1], page[-1][0]


class _Reason(logging.Handler):
    """A handler that keeps OpenTelemetry's last message, which it repeats at each try and this program logs once."""

    last = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        self.last = record.getMessage()


def main() -> int:
    """Send traces until SIGTERM, which is blocked from the start. The settings come on stdin."""
    os.environ.update(json.load(sys.stdin))
    since = float(os.environ.pop(SINCE_VARIABLE))
    config = load()
    logs.configure(config)
    reason = _Reason()
    theirs = logging.getLogger("opentelemetry")
    theirs.addHandler(reason)
    theirs.propagate = False
    exporter = OTLPSpanExporter()
    follower = Follower(
        config.require_database(), lambda spans: exporter.export(spans) is SpanExportResult.SUCCESS, since=since
    )
    well = True
    while True:
        trouble: str | None = None
        try:
            if not follower.look():
                trouble = reason.last
        except KqueueError as error:
            trouble = str(error)
        if (trouble is None) is not well:
            well = trouble is None
            if well:
                _log.info("traces are sent again")
            else:
                _log.warning("traces cannot be sent now", reason=trouble, given_up_after_s=KEPT.total_seconds())
        if signal.sigtimedwait({signal.SIGTERM}, _LOOK_EVERY_S if well else _PAUSE_S) is not None:
            break
    if well:
        with suppress(KqueueError):
            follower.look()
    return 0


if __name__ == "__main__":
    sys.exit(main())
