"""`kqueue submit`, `wait` and `watch`: submit kernels, await their verdicts, and show their progress.

Kernels come from files, folders, globs or JSON lines.
"""

from __future__ import annotations

import shlex
import sys
import threading
import time
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Final
from uuid import UUID

import typer

from kqueue.cli import options, sources
from kqueue.cli.connection import Reader, reading
from kqueue.cli.render import Columns, category_text, console, counted, emit, make_bar, progress, say, table, write_json
from kqueue.cli.sources import Entry
from kqueue.errors import InvalidRequest, KqueueError, UnknownEvaluation, WaitTimeout
from kqueue.figures import brief, milliseconds, speedup
from kqueue.text import clean

if TYPE_CHECKING:
    from collections.abc import Callable

    from kqueue.client import Client, Ticket
    from kqueue.contract import Verdict
    from kqueue.store.reports import BatchState, Waiting

#: Seconds between two checks for a new reason why an evaluation waits.
_EXPLAIN_S: Final = 5.0
#: Entries submitted in one transaction. A long stream is submitted while it is being read.
_CHUNK: Final = 200

#: Fields of a verdict that a line of `kqueue results --json` has too.
_OF_RESULTS: Final = (
    *("evaluation_id", "backend", "lane", "attempts", "category", "blame", "compiled", "correctness"),
    *("message", "runtime_ms", "baseline_ms", "speedup", "speedup_low", "speedup_high", "reused_from"),
)


@dataclass(slots=True)
class Item:
    """One line of output: a kernel or input line, and its result, or the reason why there is none."""

    entry: Entry
    ticket: Ticket | None = None
    error: str | None = None
    verdict: dict[str, Any] | None = None
    result: Verdict | None = None
    source: str = ""

    @property
    def waits(self) -> bool:
        """True if it still waits for its verdict."""
        return self.ticket is not None and self.verdict is None and self.error is None

    def label(self, kind: str) -> str | None:
        name = f"{kind}_label"
        return self.entry.fields.get(name) or self.of_verdict(name)

    def of_verdict(self, name: str) -> Any:
        """Return a field of the verdict. None if there is no verdict."""
        return (self.verdict or {}).get(name)

    def to_json(self) -> dict[str, Any]:
        low, high = self.of_verdict("speedup_interval") or (None, None)
        flat = {**(self.verdict or {}), "speedup_low": low, "speedup_high": high}
        return {
            **({name: flat.get(name) for name in _OF_RESULTS} if self.verdict else {}),
            "input": self.entry.where,
            "id": None if self.ticket is None else str(self.ticket.evaluation_id),
            "created": None if self.ticket is None else self.ticket.created,
            "problem_label": self.label("problem"),
            "kernel_label": self.label("kernel"),
            "error": self.error,
            "verdict": self.verdict,
        }


def submit(
    kernels: Annotated[list[str] | None, typer.Argument(metavar="KERNEL", help="More kernels, like --kernel.")] = None,
    *,
    problem: Annotated[
        str | None,
        typer.Option("--problem", "-p", metavar="FILE", help="The reference. `sha256:HASH` names a stored one."),
    ] = None,
    kernel: Annotated[
        list[str] | None,
        typer.Option(
            "--kernel", "-k", metavar="PATH", help="File, folder or glob, with one evaluation per file. Repeatable."
        ),
    ] = None,
    backend: options.Backend = None,
    jsonl: Annotated[
        str | None, typer.Option(metavar="FILE", help="JSON lines with one request each, or - for stdin.")
    ] = None,
    lane: Annotated[str | None, typer.Option(help="auto, cpu, gpu, or gpu.<model>.", show_default="auto")] = None,
    allow_idle_lane: Annotated[
        bool, typer.Option("--allow-idle-lane", help="Submit even if no worker serves the lane.")
    ] = False,
    tree: options.Tree = None,
    judging: options.Judging,
    batch: Annotated[str | None, typer.Option(help="A name for this group of evaluations.")] = None,
    idempotency_key: Annotated[
        str | None, typer.Option(help="A later submission with the same key returns the same evaluation.")
    ] = None,
    priority: Annotated[
        str | None,
        typer.Option(
            help="`interactive`, which comes first, `batch`, or `idle`, which comes last.", show_default="batch"
        ),
    ] = None,
    producer: Annotated[
        str | None, typer.Option(metavar="NAME", help="The submitter's name. Producers share the devices' time.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Judge again, even if an equal evaluation was judged before.")
    ] = False,
    queue_wait: Annotated[
        float | None, typer.Option(metavar="S", help="Maximum seconds that an evaluation waits for a worker.")
    ] = None,
    callback: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Post the verdict to this URL, or with --batch the batch's counts at its end."
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", "-w", help="Wait for the verdicts. Exit with 1 if one did not pass.")
    ] = False,
    timeout: options.Timeout = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON line per evaluation, in input order.")
    ] = False,
) -> None:
    """Submit kernels, one evaluation each."""
    from kqueue.client import connect

    if timeout is not None and not wait:
        raise InvalidRequest("--timeout: give --wait too")
    given = {
        "backend": backend,
        "lane": lane,
        "settings": judging.tree() or None,
        "batch": batch,
        "idempotency_key": idempotency_key,
        "priority": priority,
        "producer": producer,
        "reuse": False if fresh else None,
        "queue_wait_s": queue_wait,
        "callback_url" if batch is None else "batch_callback_url": callback,
    }
    fields = {name: value for name, value in given.items() if value is not None}
    if problem is not None:
        fields |= sources.read_problem(problem)
    fields |= sources.read_tree(tree)
    entries = _entries([*(kernel or ()), *(kernels or ())], jsonl, fields)
    items: list[Item] = []
    write_ready = _writer(items, wait=wait, as_json=as_json)
    with connect() as client, _way_back(items, batch):
        while chunk := list(islice(entries, _CHUNK)):
            items += _submit(client, chunk, allow_idle_lane)
            write_ready()
        if wait:
            _await(client, items, timeout, write_ready, quiet=as_json)
    if not as_json:
        _print(items, wait=wait)
    if any(item.ticket is None for item in items):
        raise typer.Exit(2)
    if wait:
        _exit_by_verdicts(items)


def wait(
    ids: options.Evaluations = None,
    batch: Annotated[str | None, typer.Option(help="All evaluations of this batch, in submission order.")] = None,
    timeout: options.Timeout = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON line per evaluation, like `submit --json`.")
    ] = False,
) -> None:
    """Wait for the verdicts of evaluations that any process submitted earlier. Exit with 1 if one did not pass."""
    from kqueue.client import connect
    from kqueue.store import reports

    if not ids and batch is None:
        raise InvalidRequest("nothing to wait for: give ids or --batch NAME")
    with reading("wait") as read:
        named = [read(reports.resolve_id, prefix) for prefix in ids or ()]
        if len(named) == 1 and (waits := read(reports.waiting, named[0])) is not None:
            say(f"it waits: {waits.message}")
    with connect() as client:
        tickets = [client.get(identity) for identity in named]
        if batch is not None:
            if not (of_batch := client.batch(batch)):
                raise UnknownEvaluation(batch, what="the batch")
            tickets += of_batch
        items = [Item(Entry(str(ticket.evaluation_id), {}), ticket) for ticket in tickets]
        with _way_back(items, batch if not ids else None):
            _await(client, items, timeout, _writer(items, wait=True, as_json=as_json), quiet=as_json)
    if not as_json:
        _print(items, wait=True)
    _exit_by_verdicts(items)


def _exit_by_verdicts(items: Sequence[Item]) -> None:
    if any(item.verdict is None for item in items):
        raise typer.Exit(4)
    if any(item.of_verdict("category") != "passed" for item in items):
        raise typer.Exit(1)


def _entries(patterns: Sequence[str], jsonl: str | None, fields: Mapping[str, Any]) -> Iterator[Entry]:
    if jsonl is not None:
        if patterns:
            raise InvalidRequest("--kernel and --jsonl: give only one of them")
        if "idempotency_key" in fields:
            raise InvalidRequest("--idempotency-key names one evaluation: give each line its own key")
        return map(sources.with_backend, sources.from_lines(jsonl, fields))
    if not patterns:
        raise InvalidRequest("nothing to judge: give --kernel PATH or --jsonl FILE")
    if "problem" not in fields:
        raise InvalidRequest("--problem is missing: give --problem FILE, the reference")
    paths = sources.find_kernels(patterns)
    if len(paths) > 1 and "idempotency_key" in fields:
        raise InvalidRequest(
            f"--idempotency-key names one evaluation, not {len(paths)}: use --jsonl with a key on each line"
        )
    return map(sources.with_backend, sources.from_kernels(paths, fields))


def _writer(items: Sequence[Item], *, wait: bool, as_json: bool) -> Callable[[], None]:
    """Return a function that prints each item as JSON once it and all earlier items are ready."""
    written = 0

    def write_ready() -> None:
        nonlocal written
        while as_json and written < len(items) and not (wait and items[written].waits):
            write_json(items[written].to_json())
            written += 1

    return write_ready


def _submit(client: Client, entries: Sequence[Entry], allow_idle_lane: bool) -> list[Item]:
    given = (entry.error or entry.fields for entry in entries)
    items: list[Item] = []
    for entry, result in zip(entries, client.submit_each(given, allow_idle_lane=allow_idle_lane), strict=True):
        # The sources have been sent. Drop them to limit memory for a long stream.
        labels = {name: value for name, value in entry.fields.items() if name.endswith("_label")}
        item = Item(Entry(entry.where, labels), source=entry.fields.get("kernel", "") if len(entries) == 1 else "")
        if isinstance(result, InvalidRequest):
            item.error = str(result)
            say(item.error if item.error.startswith(entry.where) else f"{entry.where}: {item.error}")
        else:
            item.ticket = result
        items.append(item)
    return items


def _await(
    client: Client, items: Sequence[Item], timeout: float | None, arrived: Callable[[], None], *, quiet: bool
) -> None:
    """Fill in verdicts as they arrive, and errors for missing ones."""
    waiting: dict[Any, list[Item]] = {}
    for item in items:
        if item.ticket is not None:
            waiting.setdefault(item.ticket.evaluation_id, []).append(item)
    tickets = [same[0].ticket for same in waiting.values() if same[0].ticket is not None]
    try:
        with progress(len(tickets), quiet=quiet) as advance, _explained(items):
            for ticket, verdict in client.as_completed(tickets, timeout):
                for item in waiting[ticket.evaluation_id]:
                    item.verdict, item.result = verdict.summary(), verdict
                    if len(items) > 1 and not quiet:
                        say_verdict(item)
                advance(str(verdict.category))
                arrived()
    except WaitTimeout:
        late = [item for item in items if item.waits]
        for item in late:
            item.error = f"no verdict within {timeout:g} s, but the evaluation continues"
        arrived()
        say(f"{len(late)} of {len(items)} without a verdict after {timeout:g} s")


@contextmanager
def _explained(items: Sequence[Item]) -> Generator[None]:
    """During the block, report why the first evaluation without a verdict waits, if it waits long."""
    over = threading.Event()

    def explain() -> None:
        from kqueue.store import reports

        reported = None
        # The wait itself reports its errors.
        with suppress(KqueueError), reading("wait") as read:
            while not over.wait(_EXPLAIN_S):
                first = next((item.ticket for item in items if item.waits), None)
                waits = None if first is None else read(reports.waiting, first.evaluation_id)
                if first is not None and waits is not None and waits.why != reported and not over.is_set():
                    say(f"{str(first.evaluation_id)[:8]} waits: {waits.message}")
                    reported = waits.why

    threading.Thread(target=explain, daemon=True).start()
    try:
        yield
    finally:
        over.set()


@contextmanager
def _way_back(items: Sequence[Item], batch: str | None) -> Generator[None]:
    """If the block leaves evaluations without a verdict, print how to resume the wait, by ``batch`` if there is one."""
    ended = False
    try:
        yield
        ended = True
    finally:
        left = {
            str(item.ticket.evaluation_id): None
            for item in items
            if item.ticket is not None and item.verdict is None and (item.error is not None or not ended)
        }
        if left:
            names = " ".join(left) if batch is None else f"--batch {shlex.quote(batch)}"
            state, it = ("the evaluation continues", "it")
            if len(left) > 1:
                state, it = (f"{len(left)} evaluations continue", "them")
            say(f"{state}. `kqueue wait {names}` waits for {it} again, and `kqueue cancel {names}` cancels {it}")


def say_verdict(item: Item) -> None:
    """Print one line with a verdict to stderr, unless stderr is a terminal, which shows a bar."""
    if not sys.stderr.isatty():
        cells = (item.label("kernel"), item.of_verdict("category"), brief(item.of_verdict("message")))
        say(": ".join(filter(None, cells)))


VERDICT: Final[Columns[Item]] = {
    "category": lambda item: (
        category_text(item.verdict["category"], item.verdict["blame"]) if item.verdict else "no verdict yet"
    ),
    "runtime ms": lambda item: milliseconds(item.of_verdict("runtime_ms")),
    "baseline ms": lambda item: milliseconds(item.of_verdict("baseline_ms")),
    "speedup": lambda item: speedup(item.of_verdict("speedup"), item.of_verdict("speedup_interval")),
    "message": lambda item: brief(item.of_verdict("message"), item.of_verdict("reused_from"), most=100),
}
_LABELS: Final[Columns[Item]] = {
    "problem": lambda item: item.label("problem"),
    "kernel": lambda item: item.label("kernel"),
}
_SUBMITTED: Final[Columns[Item]] = {
    "id": lambda item: item.ticket and item.ticket.evaluation_id,
    **_LABELS,
    "": lambda item: "" if item.ticket is not None and item.ticket.created else "submitted before",
}
_JUDGED: Final[Columns[Item]] = {
    "id": lambda item: item.ticket and str(item.ticket.evaluation_id)[:8],
    **_LABELS,
    **VERDICT,
}


def _print(items: Sequence[Item], *, wait: bool) -> None:
    from kqueue.feedback import describe

    table(_JUDGED if wait else _SUBMITTED)(item for item in items if item.ticket is not None)
    if len(items) == 1 and items[0].result is not None:
        console().print(clean(describe(items[0].result, items[0].source)), soft_wrap=True)


#: Minimum seconds between two queries.
_POLL_S: Final = 0.5
#: Ratio of the minimum pause to the duration of a query, because queries of large batches take long.
_PAUSE_RATIO: Final = 10


def follow(names: Sequence[str], timeout: float | None, *, as_json: bool) -> None:
    """Show the progress of batches and evaluations until all have ended. Exit with 1 if one did not pass."""
    from kqueue.store import reports

    with reading("watch") as read:
        named = [read(reports.named, name, among=(reports.Kind.BATCH, reports.Kind.EVALUATION)) for name in names]
        batches = [one.key for one in named if one.kind is reports.Kind.BATCH]
        ids = [UUID(one.key) for one in named if one.kind is reports.Kind.EVALUATION]
        state = _follow(read, batches, ids, timeout, as_json=as_json)
    if set(state.categories) - {"passed"}:
        raise typer.Exit(1)


def _follow(
    read: Reader, batches: Collection[str], ids: Collection[UUID], timeout: float | None, *, as_json: bool
) -> BatchState:
    """Show each change until all evaluations have ended. Return the final state."""
    from kqueue.store import reports

    end = None if timeout is None else time.monotonic() + timeout
    lines = as_json or not sys.stderr.isatty()
    shown: tuple[object, ...] = ()
    with make_bar(quiet=lines) as bar:
        task = bar.add_task("", total=None)
        while True:
            began = time.monotonic()
            state = read(reports.state_of, batches=batches, ids=ids)
            if state is None:
                raise UnknownEvaluation(" ".join([*batches, *map(str, ids)]), what="one of the names")
            last = read(reports.last_queued, batches=batches, ids=ids) if state.queued else None
            waits = None if last is None else read(reports.waiting, last)
            bar.update(task, completed=state.done, total=state.total, description=clean(_summary(state, waits)))
            now = (state.total, state.queued, state.running, state.categories)
            if lines and now != shown:
                _emit(state, waits, as_json=as_json)
            shown = now
            if state.done == state.total:
                break
            pause = max(_POLL_S, _PAUSE_RATIO * (time.monotonic() - began))
            if end is not None:
                if time.monotonic() >= end:
                    say("they continue. Run `kqueue watch` with the same names to resume")
                    raise WaitTimeout(
                        f"{state.total - state.done} of {state.total} without a verdict after {timeout:g} s"
                    )
                pause = min(pause, max(0.0, end - time.monotonic()))
            time.sleep(pause)
    if not lines:
        _emit(state, None, as_json=False)
    return state


def _summary(state: BatchState, waits: Waiting | None) -> str:
    """Return the ended, running and queued numbers as text, with the expected start of the last one."""
    parts = [counted({str(name): number for name, number in state.categories.items()})]
    if state.running:
        parts.append(f"{state.running} running")
    if state.queued:
        parts.append(f"{state.queued} queued")
    if waits is not None:
        parts.append(_when(waits))
    return ", ".join(filter(None, parts))


def _when(waits: Waiting) -> str:
    """Return when the last queued evaluation should start, with the margin of error, or why it must wait."""
    if waits.starts_in_s is None:
        return waits.message
    if waits.error_s is None:
        return f"the last begins in {waits.starts_in_s:.0f} s at the earliest"
    return f"the last begins in about {waits.starts_in_s:.0f} s, plus or minus {waits.error_s:.0f} s"


def _emit(state: BatchState, waits: Waiting | None, *, as_json: bool) -> None:
    def show(state: BatchState) -> None:
        print(clean(f"{state.done} of {state.total} have ended: {_summary(state, waits) or 'none'}"))

    def record(state: BatchState) -> dict[str, Any]:
        return {
            "total": state.total,
            "queued": state.queued,
            "running": state.running,
            "done": state.done,
            "categories": {str(name): number for name, number in state.categories.items()},
            "last_starts_in_s": waits and waits.starts_in_s,
            "last_starts_error_s": waits and waits.error_s,
        }

    emit(state, show, as_json=as_json, record=record)
