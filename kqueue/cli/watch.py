"""`kqueue watch`: show the progress of batches and evaluations until all of them have ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Any, Final
from uuid import UUID

import typer

from kqueue.cli import options
from kqueue.cli.connection import database, why
from kqueue.cli.render import counted, emit, make_bar, say
from kqueue.errors import UnknownEvaluation, WaitTimeout
from kqueue.text import clean

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from kqueue.store.reports import BatchState, Waiting

#: Minimum seconds between two queries.
_POLL_S: Final = 0.5
#: Ratio of the minimum pause to the duration of a query, because queries of large batches take long.
_PAUSE_RATIO: Final = 10


def watch(
    names: Annotated[
        list[str], typer.Argument(metavar="BATCH|ID...", help="Batches, and evaluations by their first digits.")
    ],
    timeout: options.Timeout = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line per change.")] = False,
) -> None:
    """Show the progress of batches and evaluations until all have ended. Exit with 1 if one did not pass.

    A terminal shows a bar. Otherwise a line is printed for each change.
    """
    from kqueue.store import reports

    with database("watch") as engine:
        among = (reports.Kind.BATCH, reports.Kind.EVALUATION)
        named = [reports.named(engine, name, among=among) for name in names]
        batches = [one.key for one in named if one.kind is reports.Kind.BATCH]
        ids = [UUID(one.key) for one in named if one.kind is reports.Kind.EVALUATION]
        state = _follow(engine, batches, ids, timeout, as_json=as_json)
    if set(state.categories) - {"passed"}:
        raise typer.Exit(1)


def _follow(
    engine: Engine, batches: Collection[str], ids: Collection[UUID], timeout: float | None, *, as_json: bool
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
            state = reports.state_of(engine, batches=batches, ids=ids)
            if state is None:
                raise UnknownEvaluation(" ".join([*batches, *map(str, ids)]), what="one of the names")
            last = reports.last_queued(engine, batches=batches, ids=ids) if state.queued else None
            waits = None if last is None else why(engine, last)
            bar.update(task, completed=state.done, total=state.total, description=clean(_summary(state, waits)))
            now = (state.total, state.queued, state.running, state.categories)
            if lines and now != shown:
                _emit(state, waits, as_json=as_json)
            shown = now
            if state.done == state.total:
                break
            took = time.monotonic() - began
            pause = max(_POLL_S, _PAUSE_RATIO * took)
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
