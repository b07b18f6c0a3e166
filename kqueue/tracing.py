"""The trace that a submission belongs to, in the format of W3C's trace context.

A producer that uses OpenTelemetry has imported its API already, so this module does not import it. The evaluation
stores the producer's ``traceparent``, and :mod:`workers.traces` reports its progress as spans of the same trace.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

#: The HTTP header that names a trace.
HEADER: Final = "traceparent"
#: Version, trace, span, flags. A later version can append more.
_FORM: Final = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[\x21-\x7e]{1,200})?")

#: The trace that the HTTP request of this context named.
_received: ContextVar[str | None] = ContextVar("kqueue_traceparent", default=None)


class Parent(NamedTuple):
    """The parent of an evaluation's spans. ``sampled`` is False if the trace's creator does not record it."""

    trace_id: int
    span_id: int
    sampled: bool

    @classmethod
    def read(cls, text: str | None) -> Parent | None:
        """Parse a ``traceparent``. Return None if it is missing or malformed."""
        match = _FORM.fullmatch(text or "")
        if match is None or (match[1] == "00" and match[5] is not None):
            return None
        parent = cls(int(match[2], 16), int(match[3], 16), bool(int(match[4], 16) & 1))
        return parent if parent.trace_id and parent.span_id else None

    def __str__(self) -> str:
        """Return the ``traceparent``."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.sampled:02x}"


@contextmanager
def received(header: bytes | None) -> Generator[None]:
    """Assign submissions within the block to the trace that a request's header names, if it names one."""
    parent = Parent.read(None if header is None else header.decode("latin-1"))
    mark = _received.set(None if parent is None else str(parent))
    try:
        yield
    finally:
        _received.reset(mark)


@contextmanager
def submission(count: int) -> Generator[str | None]:
    """Record a submission within the block as the PRODUCER span ``submit``, if the process uses OpenTelemetry.

    Yields:
        The ``traceparent`` of the submission: the span, or the trace of :func:`received`, or None.
    """
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None:
        yield _received.get()
        return
    with trace.get_tracer("kqueue").start_as_current_span(
        "submit",
        kind=trace.SpanKind.PRODUCER,
        attributes={"kqueue.evaluations": count},
        # Messages can quote a submission.
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        context = span.get_span_context()
        try:
            yield (
                str(Parent(context.trace_id, context.span_id, context.trace_flags.sampled))
                if context.is_valid
                else _received.get()
            )
        except Exception as error:
            span.set_status(trace.StatusCode.ERROR, type(error).__name__)
            raise
