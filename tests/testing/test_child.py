"""The output of a process of tests is limited to a judge's limit."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import pytest

from workers.judge.pipeline import pytest_run
from workers.testing import child, claims
from workers.testing.groups import Order


def order(**fields: Any) -> Order:
    given = {"args": [], "program": "", "searched": [], "options": {}, "tests": [], "files": [], "basetemp": ""}
    limits = {"renew_bytes": 256 << 10, "said_bytes": 1536 << 10}
    return Order(**given, locks=[], **limits | fields)


def said(asked: Order, *words: dict[str, Any]) -> list[bytes]:
    ours, theirs = socket.socketpair()
    lines: list[bytes] = []

    def listen() -> None:
        while data := ours.recv(1 << 20):
            lines.append(data)

    listener = threading.Thread(target=listen)
    with ours, theirs:
        listener.start()
        speaker = child._Child(asked, theirs.fileno())
        for word in words:
            speaker.say(**word)
        theirs.shutdown(socket.SHUT_WR)
        listener.join()
    return b"".join(lines).splitlines()


def failure(request: pytest.FixtureRequest, message: str, **fields: Any) -> dict[str, Any]:
    """Return the data of a failed test's report with a message."""
    with pytest.raises(AssertionError) as info:
        raise AssertionError(message)
    made = pytest.TestReport(
        request.node.nodeid, ("f.py", 1, "t"), {}, "failed", request.node.repr_failure(info), "call", **fields
    )
    return request.config.hook.pytest_report_to_serializable(config=request.config, report=made)


WARNING = {"at": "warning", "nodeid": "x", "warning": {"words": "careful " * 20}}


def test_a_judge_hears_the_end(request: pytest.FixtureRequest) -> None:
    """The report arrives after ten thousand warnings of a test and long comparisons in failures."""
    data = failure(request, "\n".join(f"  at {number}" for number in range(20_000)))
    words = [WARNING] * 10_000 + [{"at": "report", "data": data}] * 40 + [{"at": "end"}]
    for limits in ({}, {"renew_bytes": None}):  # tests, and tests under a sanitizer
        heard = said(order(**limits), *words)
        assert sum(map(len, heard)) < pytest_run._MOST_BYTES
        assert json.loads(heard[-1]) == {"at": "end"}
        assert len([line for line in heard if b'"report"' in line]) == 40


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sections": [("Captured stdout call", "x" * 10_000)] * 1_000},
        {"user_properties": [("size", "y" * 100)] * 20_000},
        {"extra": {str(number): number for number in range(50_000)}},
        {"more": [[[["z" * 100] * 12] * 12] * 12] * 12},
    ],
    ids=lambda fields: "".join(fields),
)
def test_a_report_is_bounded_as_a_whole(request: pytest.FixtureRequest, fields: dict[str, Any]) -> None:
    """The report's total size is limited, whichever part is long, and pytest can read it."""
    data = failure(request, "\n".join(f"  at {number}" for number in range(20_000)), **fields)
    [line] = said(order(), {"at": "report", "data": data})
    assert len(line) <= child._LONGEST
    read = json.loads(line)["data"]
    report = request.config.hook.pytest_report_from_serializable(config=request.config, data=claims.with_tuples(read))
    claims.check_report(report)
    assert report.failed
    assert "at 0" in report.longreprtext
    assert "more" in report.longreprtext


def test_what_is_short_is_said_as_it_is(request: pytest.FixtureRequest) -> None:
    data = failure(request, "so")
    assert json.loads(said(order(), {"at": "report", "data": data})[0])["data"] == json.loads(json.dumps(data))
    assert len(said(order(renew_bytes=None, said_bytes=None), {"at": "x", "words": "y" * 1_000_000})[0]) > 1_000_000
