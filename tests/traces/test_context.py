"""Reading a `traceparent`."""

from __future__ import annotations

import sys

import pytest
from opentelemetry.propagate import extract
from opentelemetry.trace import get_current_span

from kqueue import tracing
from kqueue.tracing import Parent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_it_is_read_as_opentelemetry_reads_it() -> None:
    """The same texts are valid, with the same ids and flag, except that a line feed is refused."""
    ids, rest = f"00-{TRACE}-{SPAN}", f"{TRACE}-{SPAN}-01"
    right = [f"{ids}-01", f"{ids}-00", f"{ids}-03", f"cc-{rest}-more"]
    wrong = [f"{ids}-01-more", f"ff-{rest}", f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01"]
    wrong += [f"00-{TRACE.upper()}-{SPAN}-01", ids, ""]
    for text in (*right, *wrong):
        theirs = get_current_span(extract({"traceparent": text})).get_span_context()
        ours = Parent.read(text)
        assert (ours is not None) is theirs.is_valid is (text in right), text
        if ours is not None:
            assert ours == (theirs.trace_id, theirs.span_id, theirs.trace_flags.sampled)
            assert Parent.read(str(ours)) == ours
    assert Parent.read(f"{ids}-01\n") is None


@pytest.mark.parametrize("loaded", [True, False])
def test_a_submission_belongs_to_the_request_s_trace(loaded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a valid `traceparent` is accepted, whether OpenTelemetry's API is loaded and unused, or not loaded."""
    if not loaded:
        monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    header = f"00-{TRACE}-{SPAN}-01"
    with tracing.received(header.encode()), tracing.submission(1) as parent:
        assert parent == header
    for wrong in (None, b"\xff", b"DROP TABLE", header.encode() * 2):
        with tracing.received(wrong), tracing.submission(1) as parent:
            assert parent is None
