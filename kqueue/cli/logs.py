"""`kqueue logs`: all records and log lines of one evaluation, in order of time."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from heapq import nlargest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final
from uuid import UUID

import typer

from kqueue.cli import options
from kqueue.cli.connection import detail_of
from kqueue.cli.render import console, emit, say
from kqueue.errors import ConfigError, DatabaseUnavailable, InvalidRequest, UnknownEvaluation
from kqueue.text import clean, one_line

if TYPE_CHECKING:
    from kqueue.store.reports import Detail

#: Maximum size in bytes of a log line. The rest of a longer line is skipped.
_LINE_BYTES: Final = 64 << 10
#: Maximum number of lines without a timestamp that are assigned to the line before them, as in a traceback.
_FOLLOWING: Final = 60
#: Maximum number of shown characters of a line.
_SHOWN_CHARACTERS: Final = 2000
#: Timestamp of a line, as kqueue, Postgres, containers' logs and the journal write it.
_TIME: Final = re.compile(rb"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d(?:[.,]\d{1,9})?) ?(Z|UTC|[+-]\d\d:?\d\d)?")
#: Bytes at the start of a line that are searched for a timestamp. The name of a container or a host can precede it.
_TIME_WITHIN: Final = 200
_LONG_AGO: Final = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Event:
    """A record or a log line of an evaluation.

    Attributes:
        at: its time in UTC, or None if it is unknown.
        source: ``database``, or the file's name.
        event: one line that describes it, which can contain untrusted text.
        fields: further data.
        lines: lines that follow it, of a kernel's log or a traceback.
    """

    at: datetime | None
    source: str
    event: str
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    lines: tuple[str, ...] = ()


def logs(
    evaluation: options.Evaluation,
    file: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="A log file, or `-` for standard input. Repeatable. Default: `kqueue up`'s."),
    ] = None,
    limit: Annotated[
        int, typer.Option(min=1, max=100_000, help="Maximum number of entries. The latest are shown.")
    ] = 1000,
    as_json: options.Json = False,
) -> None:
    """Show the history of an evaluation, in order of time.

    It includes attempts, the verdict, the kernel's log, and the lines of the fleet's logs that name the evaluation.
    """
    from kqueue.config import load

    files = file if file is not None else _own_files(load().home_path)
    detail = None
    try:
        detail = detail_of("logs", evaluation)
        identity = detail.evaluation_id
    except (ConfigError, DatabaseUnavailable, UnknownEvaluation) as error:
        # Its lines can still exist. Only a whole id can be searched for.
        try:
            identity = UUID(evaluation)
        except ValueError:
            raise error from None
        say(f"searching only log files: {error}")
    recorded = [] if detail is None else list(timeline(detail))
    entries, omitted = latest((*recorded, *(one for name in files for one in _read(name, identity))), limit)
    if not entries and detail is None:
        raise UnknownEvaluation(identity)
    if omitted:
        say(f"{omitted} earlier entries are omitted: see --limit")
    for one in entries:
        emit(one, _print, as_json=as_json)


def latest(events: Iterable[Event], limit: int) -> tuple[list[Event], int]:
    """Return the latest events in order of time, and the number of omitted ones. Hold only ``limit`` in memory."""
    seen = 0

    def counted() -> Iterator[tuple[datetime, int, Event]]:
        nonlocal seen
        for seen, event in enumerate(events, 1):
            yield event.at or _LONG_AGO, seen, event

    kept = nlargest(limit, counted(), key=lambda one: one[:2])
    return [event for _, _, event in reversed(kept)], seen - len(kept)


def timeline(detail: Detail) -> Iterator[Event]:
    """Yield the events of an evaluation's rows in the database."""
    fields = {
        "lane": detail.lane,
        "batch": detail.batch,
        "problem": detail.problem_label,
        "kernel": detail.kernel_label,
    }
    yield Event(detail.submitted_at, "database", "submitted", fields)
    for attempt in detail.attempts:
        about = {"attempt": attempt.number, "worker": attempt.worker}
        device = (attempt.environment or {}).get("device")
        yield Event(attempt.started_at, "database", "attempt begins", about | {"device": device})
        if attempt.ended_at is not None:
            # Where the judge could not report the phase, it comes from the status page.
            how = {"category": attempt.category, "phase": attempt.phase, "written_by": attempt.written_by}
            fields = about | how | {"message": attempt.message}
            yield Event(attempt.ended_at, "database", "attempt ended", fields)
    verdict = detail.verdict
    if verdict is not None:
        fields = {
            "category": verdict.category,
            "blame": verdict.blame,
            "phase": verdict.phase,
            "message": verdict.message,
            "written_by": verdict.written_by,
            "reused_from": verdict.reused_from,
            "durations_s": verdict.evidence.durations_s,
        }
        yield Event(verdict.finished_at, "database", "verdict", fields)
        if verdict.log:
            yield Event(verdict.finished_at, "database", "the kernel's log", {}, tuple(verdict.log.splitlines()))


def lines_about(stream: BinaryIO, source: str, identity: UUID) -> Iterator[Event]:
    """Yield the lines of a log that name an evaluation, and the lines without a timestamp that follow them.

    A line without a timestamp has the time of the line before it. One line is held in memory at a time.

    Args:
        stream: the log: JSON objects or text, perhaps with a prefix of a container or the journal on each line.
    """
    wanted = str(identity).encode()
    at: datetime | None = None
    current: Event | None = None
    following: list[str] = []
    for line in _lines(stream):
        seen = _time(line)
        at = seen or at
        if wanted in line:
            if current is not None:
                yield _with(current, following)
            current, following = _parsed(line, at, source), []
        elif current is not None and seen is None and len(following) < _FOLLOWING:
            following.append(line.decode(errors="replace"))
        elif current is not None:
            yield _with(current, following)
            current = None
    if current is not None:
        yield _with(current, following)


def _own_files(home: Path) -> list[str]:
    """Return the logs of the fleet that runs, or ran, under a home. Rotated files come first."""
    folder = home / "logs"
    return [str(path) for path in (*sorted(folder.glob("*.log.1")), *sorted(folder.glob("*.log")))]


def _read(name: str, identity: UUID) -> Iterator[Event]:
    with _opened(name) as stream:
        yield from lines_about(stream, "stdin" if name == "-" else Path(name).name, identity)


@contextmanager
def _opened(name: str) -> Generator[BinaryIO]:
    if name == "-":
        yield sys.stdin.buffer
        return
    try:
        stream = Path(name).open("rb")  # noqa: SIM115 -- closed below
    except OSError as error:
        raise InvalidRequest(f"--file {name}: it cannot be read: {error.strerror}") from None
    with stream:
        yield stream


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    """Yield lines without their ends, each cut to the maximum size."""
    whole = True
    while piece := stream.readline(_LINE_BYTES):
        if whole:
            yield piece.rstrip(b"\r\n")
        whole = piece.endswith(b"\n")


def _time(line: bytes) -> datetime | None:
    """Return the timestamp of a line, in UTC unless it has a zone."""
    if (start := line.find(b'"timestamp"')) >= 0:
        match = _TIME.match(line, line.find(b'"', start + len('"timestamp"')) + 1)
    else:
        match = _TIME.search(line, 0, _TIME_WITHIN)
    if match is None:
        return None
    day, clock, zone = ((part or b"").decode() for part in match.groups())
    clock, _, fraction = clock.replace(",", ".").partition(".")
    try:
        moment = datetime.fromisoformat(f"{day}T{clock}")
        moment += timedelta(microseconds=int(fraction.ljust(6, "0")[:6] or 0))
        if zone in ("", "Z", "UTC"):
            return moment.replace(tzinfo=UTC)
        return datetime.fromisoformat(f"{moment.isoformat()}{zone}").astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def _parsed(line: bytes, at: datetime | None, source: str) -> Event:
    text = line.decode(errors="replace")
    try:
        record: Any = json.loads(text[text.index("{") :])
    except (ValueError, RecursionError):
        return Event(at, source, text)
    if not isinstance(record, dict) or "event" not in record:
        return Event(at, source, text)
    fields: dict[str, Any] = {str(name): value for name, value in record.items()}  # pyright: ignore[reportUnknownArgumentType]
    fields.pop("timestamp", None)
    return Event(at, source, str(fields.pop("event")), fields)


def _with(event: Event, following: list[str]) -> Event:
    return Event(event.at, event.source, event.event, event.fields, tuple(following))


def _print(event: Event) -> None:
    out = console()
    when = "" if event.at is None else event.at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"
    fields = " ".join(f"{name}={_value(value)}" for name, value in event.fields.items() if value is not None)
    text = one_line(f"{event.event[:_SHOWN_CHARACTERS]}  {fields[:_SHOWN_CHARACTERS]}")
    out.print(f"{when:<24}  {one_line(event.source):<11}  ", end="", style="dim", soft_wrap=True)
    out.print(text, soft_wrap=True)
    for line in event.lines:
        out.print(f"    {clean(line[:_SHOWN_CHARACTERS])}", soft_wrap=True)


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
