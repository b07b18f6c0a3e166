"""`kqueue watch`: how far batches and evaluations are, until all of them have ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Any, Final
from uuid import UUID

import typer

from kqueue.cli.progress import counted, make_bar
from kqueue.cli.render import say, write_json
from kqueue.cli.results import database, why
from kqueue.errors import UnknownEvaluation, WaitTimeout
from kqueue.text import clean

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from kqueue.store.reports import BatchState, Waiting

#: Seconds between two looks at least. A look at a large batch takes long, and the next one comes after ten times that.
_LOOK_S: Final = 0.5
_LOOKS_SHARE: Final = 10


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(watch)


def watch(
    names: Annotated[
        list[str], typer.Argument(metavar="BATCH|ID...", help="Batches, and evaluations by their first digits.")
    ],
    timeout: Annotated[float | None, typer.Option(metavar="S", min=0, help="Seconds to watch at most.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line per change.")] = False,
) -> None:
    """Show how far batches and evaluations are, until all have ended. Exit with 1 if one did not pass.

    On a terminal it is a bar; elsewhere there is a line for each change.
    """
    from kqueue.store import reports

    with database("watch") as engine:
        among = (reports.Kind.BATCH, reports.Kind.EVALUATION)
        found = [reports.named(engine, name, among=among) for name in names]
        batches = [one.key for one in found if one.kind is reports.Kind.BATCH]
        ids = [UUID(one.key) for one in found if one.kind is reports.Kind.EVALUATION]
        state = _follow(engine, batches, ids, timeout, as_json=as_json)
    if set(state.categories) - {"passed"}:
        raise typer.Exit(1)


def _follow(
    engine: Engine, batches: Collection[str], ids: Collection[UUID], timeout: float | None, *, as_json: bool
) -> BatchState:
    """Show each change until all have ended. Return what they came to.

    Raises:
        WaitTimeout: they have not ended in time.
        UnknownEvaluation: none of them is there any more.
    """
    from kqueue.store import reports

    end = None if timeout is None else time.monotonic() + timeout
    lines = as_json or not sys.stderr.isatty()
    told: tuple[object, ...] = ()
    with make_bar(quiet=lines) as bar:
        task = bar.add_task("", total=None)
        while True:
            began = time.monotonic()
            state = reports.state_of(engine, batches=batches, ids=ids)
            if state is None:
                raise UnknownEvaluation(" ".join([*batches, *map(str, ids)]), what="what was watched:")
            last = reports.last_queued(engine, batches=batches, ids=ids) if state.queued else None
            waits = None if last is None else why(engine, last)
            bar.update(task, completed=state.done, total=state.total, description=clean(_said(state, waits)))
            now = (state.total, state.queued, state.running, state.categories)
            if lines and now != told:
                _tell(state, waits, as_json=as_json)
            told = now
            if state.done == state.total:
                break
            took = time.monotonic() - began
            pause = max(_LOOK_S, _LOOKS_SHARE * took)
            if end is not None:
                if time.monotonic() >= end:
                    say("they continue: `kqueue watch` with the same names comes back to them")
                    raise WaitTimeout(
                        f"{state.total - state.done} of {state.total} without a verdict after {timeout:g} s"
                    )
                pause = min(pause, max(0.0, end - time.monotonic()))
            time.sleep(pause)
    if not lines:
        _tell(state, None, as_json=False)
    return state


def _said(state: BatchState, waits: Waiting | None) -> str:
    """Return in words what has not ended, what the others came to, and when the last one begins."""
    parts = [counted({str(name): number for name, number in state.categories.items()})]
    if state.running:
        parts.append(f"{state.running} run")
    if state.queued:
        parts.append(f"{state.queued} queued")
    if waits is not None:
        parts.append(_when(waits))
    return "; ".join(filter(None, parts))


def _when(waits: Waiting) -> str:
    """Return when the last one that is queued begins, with the error of that, or why it does not."""
    if waits.starts_in_s is None:
        return waits.message
    if waits.error_s is None:
        return f"the last begins in {waits.starts_in_s:.0f} s at the earliest"
    return f"the last begins in about {waits.starts_in_s:.0f} s, give or take {waits.error_s:.0f} s"


def _tell(state: BatchState, waits: Waiting | None, *, as_json: bool) -> None:
    if not as_json:
        typer.echo(clean(f"{state.done} of {state.total} have ended: {_said(state, waits) or 'none'}"))
        return
    record: dict[str, Any] = {
        "total": state.total,
        "queued": state.queued,
        "running": state.running,
        "done": state.done,
        "categories": {str(name): number for name, number in state.categories.items()},
        "last_starts_in_s": None if waits is None else waits.starts_in_s,
        "last_starts_error_s": None if waits is None else waits.error_s,
    }
    write_json(record)
