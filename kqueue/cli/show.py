"""`kqueue show`, `logs` and `diff`: one evaluation in full, its records in order of time, and two side by side."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from heapq import nlargest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final
from uuid import UUID

import typer

from kqueue import registry
from kqueue.cli import options
from kqueue.cli.connection import detail_of
from kqueue.cli.render import Columns, category_text, console, emit, print_table, say, table, text
from kqueue.errors import ConfigError, InvalidRequest, ServiceError, UnknownEvaluation
from kqueue.figures import finding, flat, listed, milliseconds, moment, provenance, speedup, yes_no
from kqueue.states import EvaluationState
from kqueue.text import clean, one_line, short

if TYPE_CHECKING:
    from rich.text import Text

    from kqueue.contract import Outcome, Verdict
    from kqueue.evidence import Measurement
    from kqueue.store.reports import AttemptDetail, Detail

#: Maximum number of lines of the log that `show` prints without `--log`.
_LOG_LINES: Final = 20
_STYLES: Final = {"+": "green", "-": "red", "@": "cyan"}
_Id = Annotated[str, typer.Argument(help="An evaluation's id, or its first digits.")]


def show(
    evaluation: options.Evaluation,
    as_json: options.Json = False,
    source: Annotated[bool, typer.Option("--source", help="Show the sources too.")] = False,
    log: Annotated[bool, typer.Option("--log", help="Show the whole stored log.")] = False,
) -> None:
    """Show one evaluation.

    It prints settings, attempts, the verdict in words, times, the end of the log, facts and evidence. `--json` has long
    values in full.
    """
    found = detail_of("show", evaluation)

    def record(detail: Detail) -> dict[str, Any]:
        fields = asdict(detail)
        if not source:
            del fields["problem"], fields["kernel"]
        if detail.verdict is not None:
            fields["verdict"] = detail.verdict.model_dump(mode="json") | detail.verdict.summary()
        return fields

    def print_(detail: Detail) -> None:
        queued = detail.state == EvaluationState.QUEUED
        _print_fields(
            evaluation=detail.evaluation_id,
            state=detail.state,
            waits=detail.waiting and detail.waiting.message,
            **_about(detail),
            batch=detail.batch,
            submitted=moment(detail.submitted_at),
            expires=moment(detail.expires_at) if queued else "",
        )
        table(_ATTEMPT)(detail.attempts)
        for call in detail.callbacks:
            sent, after = moment(call.delivered_at), moment(call.next_at)
            _print_fields(callback=call.host, attempts=call.attempts, delivered=sent, next=after, error=call.error)
        if detail.verdict is not None:
            _print_verdict(detail.verdict, detail.kernel, all_of_log=log)
        if source:
            _print_block("problem", detail.problem)
            _print_block("kernel", detail.kernel)

    emit(found, print_, as_json=as_json, record=record)


_ATTEMPT: Final[Columns[AttemptDetail]] = {
    "attempt": lambda attempt: attempt.number,
    "worker": lambda attempt: attempt.worker,
    "device": lambda attempt: (attempt.environment or {}).get("device"),
    "started": lambda attempt: moment(attempt.started_at),
    "took s": lambda attempt: (
        f"{(attempt.ended_at - attempt.started_at).total_seconds():.2f}" if attempt.ended_at else ""
    ),
    "category": lambda attempt: (
        category_text(attempt.category, attempt.category.blame) if attempt.category else "running"
    ),
    "message": lambda attempt: attempt.message,
}


def _about(detail: Detail) -> dict[str, str]:
    return {
        "problem": f"{detail.problem_label or ''} {detail.problem_hash[:12]}",
        "kernel": f"{detail.kernel_label or ''} {detail.kernel_hash[:12]} ({detail.backend})",
        "lane": detail.lane,
        "settings": _settings(detail.settings),
    }


def _print_fields(**fields: object) -> None:
    """Print names and values in two columns. Empty values are omitted."""
    for name, value in fields.items():
        if value is not None and value != "":
            console().print(f"{name:<11}", end="", style="bold")
            console().print(one_line(value), soft_wrap=True)


def _print_block(title: str, lines: str) -> None:
    console().print(f"--- {title}", style="bold")
    console().print(clean(lines.rstrip("\n")), soft_wrap=True)


def _settings(settings: Mapping[str, Any]) -> str:
    """Return precision, checks, and all settings that differ from the default."""
    from kqueue.contract import Settings

    default = dict(flat(Settings().model_dump(mode="json")))
    shown = {"precision", "checks"}
    return " ".join(
        f"{name}={value}" for name, value in flat(settings) if name in shown or default.get(name, ...) != value
    )


def _print_verdict(verdict: Verdict, kernel: str, *, all_of_log: bool) -> None:
    reused = verdict.reused_from and f"from {verdict.reused_from}, judged {moment(verdict.judged_at)}"
    finished = f"{moment(verdict.finished_at)}, written by {verdict.written_by}"
    print_result(verdict, kernel, {"finished": finished, "reused": reused}, all_of_log=all_of_log)
    for title in ("environment", "facts", "evidence"):
        _print_block(
            title, "\n".join(f"{name:<22} {short(value, 500)}" for name, value in listed(getattr(verdict, title) or ()))
        )


def print_result(result: Outcome | Verdict, kernel: str, fields: Mapping[str, object], *, all_of_log: bool) -> None:
    """Print the result of one kernel in words, without facts and evidence.

    ``fields`` are further names and values to print. ``all_of_log`` prints the whole log, not only its last lines.
    """
    from kqueue import feedback
    from kqueue.contract import Verdict

    console().print(category_text(result.category, result.blame), end="")
    console().print(f"  blame: {result.blame}")
    _print_fields(
        phase=result.phase,
        compiled=yes_no(result.compiled),
        correct=yes_no(result.correctness),
        runtime=_measurement(result.runtime),
        baseline=_measurement(result.baseline),
        speedup=speedup(result.speedup, result.speedup_interval),
        provenance=provenance(result.evidence.provenance),
        **fields,
    )
    _print_block("in words", feedback.describe(result, kernel))
    if isinstance(result, Verdict) and not result.passed:
        for line in filter(None, (part.hint(result) for part in registry.attached("failure"))):
            console().print(line)
    # Findings that ended the evaluation are among its facts.
    if findings := result.evidence.findings or result.facts.findings:
        _print_block("findings", "\n".join(map(finding, findings)))
    lines = result.log.splitlines()
    if lines and all_of_log:
        _print_block("log", result.log)
    elif lines:
        left_out = f", the last {_LOG_LINES} of {len(lines)} lines (--log for all)" if len(lines) > _LOG_LINES else ""
        _print_block(f"log{left_out}", "\n".join(lines[-_LOG_LINES:]))


def _measurement(taken: Measurement | None) -> str:
    if taken is None:
        return ""
    median, q1, q3, overhead = map(milliseconds, (taken.median_ms, taken.q1_ms, taken.q3_ms, taken.overhead_ms))
    if taken.median_ms <= 0:
        return f"no longer than the launch overhead, {overhead} ms"
    return (
        f"{median} ms, quartiles {q1} to {q3}, {taken.count} calls, {'cold' if taken.cold_l2 else 'warm'} L2, "
        f"{overhead} ms launch overhead subtracted, basis {taken.basis}"
    )


# diff ------------------------------------------------------------------------------------------------


def diff(
    first: _Id,
    second: _Id,
    context: Annotated[int, typer.Option(min=0, max=10_000, help="Number of lines round each change.")] = 3,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one record with `first`, `second` and `diff`.")
    ] = False,
) -> None:
    """Show the differences between two evaluations: verdicts, times and sources."""
    from kqueue import differences

    a, b = (detail_of("diff", name) for name in (first, second))
    changes = differences.of_sources(a, b, context=context)

    def record(pair: tuple[Detail, Detail]) -> dict[str, Any]:
        return {"first": _plain(pair[0]), "second": _plain(pair[1]), "diff": "\n".join(changes)}

    def print_(pair: tuple[Detail, Detail]) -> None:
        a, b = pair
        mine, others = _cells(a), _cells(b)
        rows = ((name, cell, others[name]) for name, cell in mine.items())
        print_table(("", *(str(one.evaluation_id)[:8] for one in pair)), rows)
        if summary := differences.of_times(a, b):
            console().print(text(summary))
        for line in changes or ["the sources are the same"]:
            console().print(clean(line), style=_STYLES.get(line[:1], ""), soft_wrap=True)

    emit((a, b), print_, as_json=as_json, record=record)


_SAME: Final = ("problem_label", "problem_hash", "kernel_label", "kernel_hash", "backend", "lane", "state", "settings")


def _plain(detail: Detail) -> dict[str, Any]:
    fields = {name: getattr(detail, name) for name in _SAME}
    verdict = detail.verdict and detail.verdict.summary()
    return {"evaluation_id": str(detail.evaluation_id), **fields, "verdict": verdict}


def _cells(detail: Detail) -> dict[str, str | Text]:
    verdict = detail.verdict
    runtime = verdict.runtime if verdict and verdict.runtime_ms else None
    spread = f" ({milliseconds(runtime.q1_ms)} to {milliseconds(runtime.q3_ms)})" if runtime else ""
    return {
        **_about(detail),
        "device": (verdict.environment.device or "") if verdict and verdict.environment else "",
        "category": category_text(verdict.category, verdict.blame) if verdict else detail.state,
        "runtime ms": milliseconds(runtime.median_ms) + spread if runtime else "",
        "baseline ms": milliseconds(verdict.baseline_ms if verdict else None),
        "speedup": speedup(verdict.speedup, verdict.speedup_interval) if verdict else "",
        "message": verdict.message if verdict else "",
    }


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

    if file is None:
        # Of the fleet that runs, or ran, here. Rotated files come first.
        folder = load().home_path / "logs"
        file = [str(path) for path in (*sorted(folder.glob("*.log.1")), *sorted(folder.glob("*.log")))]
    detail = None
    try:
        detail = detail_of("logs", evaluation)
        identity = detail.evaluation_id
    except (ConfigError, ServiceError, UnknownEvaluation) as error:
        # Its lines can still exist. Only a whole id can be searched for.
        try:
            identity = UUID(evaluation)
        except ValueError:
            raise error from None
        say(f"searching only log files: {error}")
    recorded = [] if detail is None else list(timeline(detail))
    entries, omitted = latest((*recorded, *(one for name in file for one in _read(name, identity))), limit)
    if not entries and detail is None:
        raise UnknownEvaluation(identity)
    if omitted:
        say(f"{omitted} earlier entries are omitted: see --limit")
    for one in entries:
        emit(one, _print_event, as_json=as_json)


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
            yield Event(attempt.ended_at, "database", "attempt ended", about | how | {"message": attempt.message})
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

    A line without a timestamp has the time of the line before it. One line is held in memory at a time. ``stream`` is
    the log: JSON objects or text, perhaps with a prefix of a container or the journal on each line.
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
                yield _followed_by(current, following)
            current, following = _parsed(line, at, source), []
        elif current is not None and seen is None and len(following) < _FOLLOWING:
            following.append(line.decode(errors="replace"))
        elif current is not None:
            yield _followed_by(current, following)
            current = None
    if current is not None:
        yield _followed_by(current, following)


def _read(name: str, identity: UUID) -> Iterator[Event]:
    if name == "-":
        yield from lines_about(sys.stdin.buffer, "stdin", identity)
        return
    try:
        stream = Path(name).open("rb")  # noqa: SIM115 -- closed below
    except OSError as error:
        raise InvalidRequest(f"--file {name}: it cannot be read: {error.strerror}") from None
    with stream:
        yield from lines_about(stream, Path(name).name, identity)


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


def _followed_by(event: Event, following: list[str]) -> Event:
    return Event(event.at, event.source, event.event, event.fields, tuple(following))


def _print_event(event: Event) -> None:
    out = console()
    when = "" if event.at is None else event.at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"
    values = {name: value for name, value in event.fields.items() if value is not None}
    fields = " ".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value, default=str)}"
        for name, value in values.items()
    )
    text = one_line(f"{event.event[:_SHOWN_CHARACTERS]}  {fields[:_SHOWN_CHARACTERS]}")
    out.print(f"{when:<24}  {one_line(event.source):<11}  ", end="", style="dim", soft_wrap=True)
    out.print(text, soft_wrap=True)
    for line in event.lines:
        out.print(f"    {clean(line[:_SHOWN_CHARACTERS])}", soft_wrap=True)
