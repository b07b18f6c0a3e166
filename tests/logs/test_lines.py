"""Log lines: foreign text in them, and `kqueue logs` on files of any size."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tracemalloc
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

from kqueue.cli.show import Event, latest, lines_about

MINE: Final = UUID("11111111-2222-3333-4444-555555555555")
OTHER: Final = UUID("99999999-2222-3333-4444-555555555555")
HOSTILE: Final = "\x1b[2J\nfake line \u202e" + "x" * 100_000
#: Logs a hostile text through structlog and stdlib logging, and an error that quotes it.
PROGRAM: Final = """
import logging, sys
import structlog
from kqueue import logs
from kqueue.config import load
hostile = sys.stdin.read()
logs.configure(load(), slot="cpu-0")
structlog.contextvars.bind_contextvars(evaluation="an id", attempt=2)
structlog.get_logger("a").warning(hostile, reason=hostile, many=[hostile] * 1000, mapped={hostile: hostile}, count=3)
logging.getLogger("b").warning("it said %s", hostile)
try:
    raise ValueError(hostile)
except ValueError:
    structlog.get_logger("a").exception("failed")
"""


def written(**environment: str) -> list[str]:
    """Return a process's log of a hostile text."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=HOSTILE.encode(), capture_output=True, check=True, env=environment
    )
    assert done.stdout == b""
    text = done.stderr.decode()
    assert not set(text) & set("\x1b\u202e\x07\r")
    return text.splitlines()


def test_foreign_text_is_escaped_and_cut() -> None:
    """JSON and text have the same fields and the bound ones, one line per event."""
    lines = [json.loads(line) for line in written(KQUEUE_LOG_JSON="true")]
    assert [line["logger"] for line in lines] == ["a", "b", "a"]
    for line in lines:
        assert (line["slot"], line["evaluation"], line["attempt"]) == ("cpu-0", "an id", 2)
        assert len(json.dumps(line)) < 50_000
        assert "\n" not in line["event"]
        assert len(line["event"]) < 3000
    assert len(lines[0]["reason"]) < 3000
    assert lines[0]["count"] == 3
    assert lines[2]["exception"].endswith("xxx")
    assert not any(line.startswith("fake line") for line in written()[:2])


def line(number: int, identity: UUID = MINE, **more: Any) -> bytes:
    """Return a line in kqueue's format, at this many seconds after the hour."""
    at = datetime(2026, 1, 2, 3, tzinfo=UTC) + timedelta(seconds=number)
    known = {"evaluation": str(identity), "event": f"event {number}", "timestamp": at.isoformat()}
    return json.dumps(known | more).encode() + b"\n"


def found(text: bytes) -> list[Event]:
    return list(lines_about(io.BytesIO(text), "a.log", MINE))


def test_times_are_read_as_they_are_written() -> None:
    """Times in the formats of kqueue, Postgres, containers and the journal are parsed."""
    for text in (
        f"2026-01-02T03:04:05.678000Z [warning] died evaluation={MINE}",
        f"worker-1  | 2026-01-02T03:04:05.678Z [warning] died evaluation={MINE}",
        f"2026-01-02T04:04:05,678+0100 host kqueue[1]: died {MINE}",
        f"2026-01-02 03:04:05.678 UTC [77] ERROR: {MINE}",
        json.dumps({"event": "died", "evaluation": str(MINE), "timestamp": "2026-01-02T03:04:05.678Z"}),
        f'worker-1  | {{"event": "died {MINE}", "timestamp": "2026-01-02T03:04:05.678Z"}}',
    ):
        [event] = found(text.encode())
        assert event.at == datetime(2026, 1, 2, 3, 4, 5, 678000, UTC), text
        assert "died" in event.event or str(MINE) in event.event, text


def test_lines_that_are_no_logs_do_no_harm() -> None:
    """Wrong JSON or times, undecodable bytes and a missing line end are accepted. A traceback belongs to its line."""
    mine = str(MINE).encode()
    text = b"\xff\xfe{" + mine + b"}\n" + b'{"timestamp": "2026-99-99T99:99:99Z", "event": "x' + mine + b'"}\n[' + mine
    assert [event.at for event in found(text)] == [None] * 3
    lines = f"2026-01-02T03:04:05Z [error] failed {MINE}\nTraceback:\n  here\n2026-01-02T03:04:06Z other\nTraceback:\n"
    [event] = found(lines.encode())
    assert event.lines == ("Traceback:", "  here")


def test_memory_is_bounded() -> None:
    """A log of many lines, or of one endless line, is read in pieces, and the latest events are kept."""
    # Made beforehand, so that only reading is measured.
    text = b"".join(line(number) if number % 3 else line(number, OTHER, filling="x" * 500) for number in range(30_000))
    stream = io.BytesIO(text + b"y" * (32 << 20))
    tracemalloc.start()
    try:
        events, left_out = latest(lines_about(stream, "a.log", MINE), 100)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(events) == 100
    assert left_out == 20_000 - 100
    assert [event.event for event in events[-3:]] == ["event 29996", "event 29998", "event 29999"]
    assert peak < 4 << 20
