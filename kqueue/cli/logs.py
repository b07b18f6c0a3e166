"""`kqueue logs`: all that is known of one evaluation, in order of time."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from heapq import nlargest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final
from uuid import UUID

import typer

from kqueue.errors import ConfigError, DatabaseUnavailable, InvalidRequest, UnknownEvaluation

if TYPE_CHECKING:
    from kqueue.store.reports import Detail

#: The longest line that is read whole, in bytes; what follows is skipped.
_LINE_BYTES: Final = 64 << 10
#: Most lines without a time of their own that belong to the line before them, as a traceback's do.
_FOLLOWING: Final = 60
#: Most characters of a line that are shown.
_SHOWN_CHARACTERS: Final = 2000
#: The time of a line: kqueue's own, Postgres', and those before the lines of containers and of the journal.
_TIME: Final = re.compile(rb"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d(?:[.,]\d{1,9})?) ?(Z|UTC|[+-]\d\d:?\d\d)?")
#: Where in a line a time is looked for, in bytes: before it may stand a container's name, or a host's.
_TIME_WITHIN: Final = 200
_LONG_AGO: Final = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that is known of an evaluation.

    Attributes:
        at: when, UTC; None if nothing tells.
        source: ``database``, or the file's name.
        event: what happened, in a line; foreign text may be in it.
        fields: what else is told.
        lines: what follows it: a kernel's log, a traceback.
    """

    at: datetime | None
    source: str
    event: str
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    lines: tuple[str, ...] = ()


def register(app: typer.Typer) -> None:
    """Add this command to ``app``."""
    app.command()(logs)


def logs(
    evaluation: Annotated[str, typer.Argument(metavar="ID", help="An evaluation's id, or its first digits.")],
    file: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="A file of logs, or `-` for standard input; repeated. Else `kqueue up`'s."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="At most so many, the latest.")] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="JSON, one record a line.")] = False,
) -> None:
    """Show what is known of an evaluation, in order of time.

    Its attempts and its verdict, the kernel's log, and the lines of the fleet's logs that name it.
    """
    from kqueue.cli.render import say
    from kqueue.config import load

    files = file if file is not None else _own_files(load().home_path)
    detail = None
    try:
        detail = _detail(evaluation)
        identity = detail.evaluation_id
    except (ConfigError, DatabaseUnavailable, UnknownEvaluation) as error:
        # Its lines may be there all the same; only a whole id can be looked for.
        try:
            identity = UUID(evaluation)
        except ValueError:
            raise error from None
        say(f"only log files are read: {error}")
    known = [] if detail is None else list(timeline(detail))
    found, left_out = latest((*known, *(one for name in files for one in _read(name, identity))), limit)
    if not found and detail is None:
        raise UnknownEvaluation(identity)
    if left_out:
        say(f"{left_out} earlier ones are left out: --limit")
    for one in found:
        _print(one, as_json=as_json)


def latest(events: Iterable[Event], limit: int) -> tuple[list[Event], int]:
    """Return the latest of events in order of time, and how many others there are. Keeps no more than these."""
    seen = 0

    def counted() -> Iterator[tuple[datetime, int, Event]]:
        nonlocal seen
        for seen, event in enumerate(events, 1):
            yield event.at or _LONG_AGO, seen, event

    found = nlargest(limit, counted(), key=lambda one: one[:2])
    return [event for _, _, event in reversed(found)], seen - len(found)


def timeline(detail: Detail) -> Iterator[Event]:
    """Yield what the database's rows tell of an evaluation."""
    asked = {"lane": detail.lane, "batch": detail.batch, "problem": detail.problem_label, "kernel": detail.kernel_label}
    yield Event(detail.submitted_at, "database", "submitted", asked)
    for attempt in detail.attempts:
        about = {"attempt": attempt.number, "worker": attempt.worker}
        device = (attempt.environment or {}).get("device")
        yield Event(attempt.started_at, "database", "attempt begins", about | {"device": device})
        if attempt.ended_at is not None:
            # Where it was is what the flight recorder said, if the judge could not.
            how = {"category": attempt.category, "phase": attempt.phase, "written_by": attempt.written_by}
            told = about | how | {"message": attempt.message}
            yield Event(attempt.ended_at, "database", "attempt ended", told)
    verdict = detail.verdict
    if verdict is not None:
        told = {
            "category": verdict.category,
            "blame": verdict.blame,
            "phase": verdict.phase,
            "message": verdict.message,
            "written_by": verdict.written_by,
            "reused_from": verdict.reused_from,
            "durations_s": verdict.evidence.durations_s,
        }
        yield Event(verdict.finished_at, "database", "verdict", told)
        if verdict.log:
            yield Event(verdict.finished_at, "database", "the kernel's log", {}, tuple(verdict.log.splitlines()))


def lines_about(stream: BinaryIO, source: str, identity: UUID) -> Iterator[Event]:
    """Yield the lines of a log that name an evaluation, and those without a time that follow them.

    One line is held at a time. A line without a time has that of the one before it.

    Args:
        stream: the log: JSON objects or text, also with a container's or the journal's words before each line.
        source: its name.
        identity: the evaluation.
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


def _detail(evaluation: str) -> Detail:
    from kqueue.cli.results import database
    from kqueue.store import reports

    with database("logs") as engine:
        return reports.show(engine, reports.resolve_id(engine, evaluation))


def _own_files(home: Path) -> list[str]:
    """Return the logs of the fleet that runs, or ran, under a home; what was rotated comes first."""
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
        stream = Path(name).open("rb")  # noqa: SIM115 -- closed below, and only its opening is refused here
    except OSError as error:
        raise InvalidRequest(f"--file {name}: it cannot be read: {error.strerror}") from None
    with stream:
        yield stream


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    """Yield lines without their ends, each cut to what is read of it."""
    whole = True
    while piece := stream.readline(_LINE_BYTES):
        if whole:
            yield piece.rstrip(b"\r\n")
        whole = piece.endswith(b"\n")


def _time(line: bytes) -> datetime | None:
    """Return the time that a line tells; UTC unless it says otherwise."""
    if (start := line.find(b'"timestamp"')) >= 0:
        found = _TIME.match(line, line.find(b'"', start + len('"timestamp"')) + 1)
    else:
        found = _TIME.search(line, 0, _TIME_WITHIN)
    if found is None:
        return None
    day, clock, zone = ((part or b"").decode() for part in found.groups())
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


def _print(event: Event, *, as_json: bool) -> None:
    from kqueue.cli.render import console, write_json
    from kqueue.text import clean, one_line

    if as_json:
        write_json(asdict(event))
        return
    out = console()
    when = "" if event.at is None else event.at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"
    told = " ".join(f"{name}={_value(value)}" for name, value in event.fields.items() if value is not None)
    text = one_line(f"{event.event[:_SHOWN_CHARACTERS]}  {told[:_SHOWN_CHARACTERS]}")
    out.print(f"{when:<24}  {one_line(event.source):<11}  ", end="", style="dim", soft_wrap=True)
    out.print(text, soft_wrap=True)
    for line in event.lines:
        out.print(f"    {clean(line[:_SHOWN_CHARACTERS])}", soft_wrap=True)


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
