"""The trace that a submission belongs to, as W3C's trace context names it.

A producer that uses OpenTelemetry has loaded its API. Nobody else does: nothing here imports it. The evaluation keeps
the producer's ``traceparent``, and :mod:`workers.traces` tells its course as spans of the same trace.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

#: The header of HTTP that names a trace.
HEADER: Final = "traceparent"
#: Version, trace, span, flags. A later version may have more after them.
_FORM: Final = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[\x21-\x7e]{1,200})?")

#: What the request of HTTP that is served in this context named.
_received: ContextVar[str | None] = ContextVar("kqueue_traceparent", default=None)


class Parent(NamedTuple):
    """The span that an evaluation's own come below.

    Attributes:
        trace_id, span_id: numbers, of 128 and of 64 bits.
        sampled: False if whoever began the trace decided that it is not to be kept.
    """

    trace_id: int
    span_id: int
    sampled: bool

    @classmethod
    def read(cls, text: str | None) -> Parent | None:
        """Return what a ``traceparent`` says; None if there is none, or it is not one."""
        found = _FORM.fullmatch(text or "")
        if found is None or (found[1] == "00" and found[5] is not None):
            return None
        parent = cls(int(found[2], 16), int(found[3], 16), bool(int(found[4], 16) & 1))
        return parent if parent.trace_id and parent.span_id else None

    def __str__(self) -> str:
        """Return it as a ``traceparent``."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.sampled:02x}"


@contextmanager
def received(header: bytes | None) -> Generator[None]:
    """Have what is submitted within the block belong to the trace that a request's header names, if it names one."""
    parent = Parent.read(None if header is None else header.decode("latin-1"))
    mark = _received.set(None if parent is None else str(parent))
    try:
        yield
    finally:
        _received.reset(mark)


@contextmanager
def submission(count: int) -> Generator[str | None]:
    """Submit within the block. A process that uses OpenTelemetry tells it as the span ``submit`` of the kind PRODUCER.

    Args:
        count: the number of evaluations.

    Yields:
        The ``traceparent`` of what is submitted: the span, else what :func:`received` has, else None.
    """
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None:
        yield _received.get()
        return
    with trace.get_tracer("kqueue").start_as_current_span(
        "submit",
        kind=trace.SpanKind.PRODUCER,
        attributes={"kqueue.evaluations": count},
        # Messages may quote what was submitted.
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        own = span.get_span_context()
        try:
            yield str(Parent(own.trace_id, own.span_id, own.trace_flags.sampled)) if own.is_valid else _received.get()
        except Exception as error:
            span.set_status(trace.StatusCode.ERROR, type(error).__name__)
            raise
