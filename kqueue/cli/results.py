"""`kqueue results`, `compare`, `cancel` and `cost`: list, compare, end and sum up evaluations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kqueue import figures
from kqueue.cli import audit, options
from kqueue.cli.connection import database, reading
from kqueue.cli.render import Columns, category_text, emit, fields, first, say, table
from kqueue.cli.token import budget_record
from kqueue.errors import InvalidRequest, KqueueError, UnknownEvaluation
from kqueue.figures import age, brief, budget, ratio, speedup
from kqueue.filters import FILTERS, choices
from kqueue.states import EvaluationState

if TYPE_CHECKING:
    from uuid import UUID

    from celery import Celery

    from kqueue.store.reports import Cost, Listed
    from kqueue.store.reports.boards import Placed
    from kqueue.store.reports.changes import Changes, Judged, Pair

#: Fields that select finished evaluations.
WHERE: Final = tuple(name for name in FILTERS if name not in ("state", "parts"))
#: Fields that select evaluations.
_FIELDS: Final = tuple(name for name in WHERE if name not in ("category", "blame"))
#: Maximum number of evaluations that are cancelled in one statement, which takes a second.
_CANCELLED: Final = 1000


def results(
    where: Annotated[
        list[str] | None, typer.Option(metavar="FIELD=VALUE", help=f"{', '.join(WHERE)}. Repeatable.")
    ] = None,
    state: Annotated[EvaluationState, typer.Option(help="Only evaluations in this state.")] = EvaluationState.DONE,
    problem: Annotated[str | None, typer.Option(help="A problem's label, or the first digits of its hash.")] = None,
    since: Annotated[str | None, typer.Option(help="Such as 30m, 2h, 7d, or 2026-01-31 (UTC).")] = None,
    batch: Annotated[str | None, typer.Option(help="The name of a batch.")] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Rank their kernels by the median of all measurements instead.")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="Maximum number of lines.")] = 50,
    as_json: options.Json = False,
) -> None:
    """List evaluations, the latest first. Only finished ones are listed unless another state is given."""
    if best and state is not EvaluationState.DONE:
        raise InvalidRequest(f"--best: {state} evaluations have no measurements: omit --state")
    filters = conditions(where or (), {"problem": problem, "batch": batch})
    after = None if since is None else figures.since(since)
    from kqueue.store import reports  # slow to import, so invalid conditions are refused first
    from kqueue.store.reports import boards

    with reading("results") as read:
        if best:
            ranked = read(boards.ranking, since=after, limit=limit + 1, **filters)
            emit(first(ranked, limit), table(_RANKED, empty="no measured kernel matches"), as_json=as_json)
            return
        if state is EvaluationState.DONE:
            listed_rows = read(reports.results, since=after, limit=limit + 1, **filters)
        else:
            listed_rows = read(reports.listing, state=state, since=after, limit=limit + 1, **filters)
    done = state is EvaluationState.DONE
    empty = f"no {'finished' if done else state} evaluation matches"
    emit(first(listed_rows, limit), table(_FINISHED if done else _OPEN, empty=empty), as_json=as_json)


_NAMES: Final[Columns[Listed | Placed]] = {
    "problem": lambda listed: listed.problem_label or listed.problem_hash[:12],
    "kernel": lambda listed: listed.kernel_label or listed.kernel_hash[:12],
    **fields("backend"),
}
#: Columns of evaluations without a verdict.
_OPEN: Final[Columns[Listed]] = {
    "id": lambda listed: str(listed.evaluation_id)[:8],
    "age": lambda listed: age(listed.submitted_at),
    **_NAMES,
    **fields("lane priority producer batch"),
}
#: Columns of evaluations with a verdict.
_FINISHED: Final[Columns[Listed]] = {
    "id": lambda listed: str(listed.evaluation_id)[:8],
    "age": lambda listed: listed.finished_at and age(listed.finished_at),
    **_NAMES,
    "category": lambda listed: category_text(str(listed.category), str(listed.blame)),
    **fields("runtime_ms baseline_ms"),
    "speedup": lambda listed: _speedup(listed),
    **fields("device"),
    "message": lambda listed: brief(listed.message, listed.reused_from, most=100),
}


#: Columns of ranked kernels.
_RANKED: Final[Columns[Placed]] = {
    "id": lambda placed: str(placed.evaluation_id)[:8],
    **_NAMES,
    "speedup": lambda placed: _speedup(placed),
    **fields("measured runtime_ms baseline_ms"),
    "precision": lambda placed: placed.precision + f" {placed.settings}" * bool(placed.settings),
    **fields("device"),
}


def _speedup(row: Listed | Placed | Judged) -> str:
    return speedup(row.speedup, (row.speedup_low, row.speedup_high))


def conditions(where: Iterable[str], options: Mapping[str, str | None], among: Sequence[str] = WHERE) -> dict[str, Any]:
    """Return the conditions as :class:`kqueue.filters.Filters`. ``where`` can have the fields ``among``."""
    asked: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    for condition in where:
        field, mark, value = condition.partition("=")
        if field not in among:
            raise InvalidRequest(f"--where {condition}: no field {field!r}. The fields are {', '.join(among)}")
        if not mark or not value:
            raise InvalidRequest(f"--where {condition}: write {field}=VALUE")
        if field in asked:
            raise InvalidRequest(f"--where {condition}: {field} is given twice")
        if (values := choices(field)) and value not in values:
            fix = "see `kqueue categories`" if field == "category" else f"use one of {', '.join(values)}"
            raise InvalidRequest(f"unknown {field} {value!r}: {fix}")
        asked[field] = value
    return asked


# compare ---------------------------------------------------------------------------------------------


def compare(
    before: Annotated[str, typer.Argument(metavar="FIRST", help="The name of a batch.")],
    after: Annotated[str, typer.Argument(metavar="SECOND", help="The name of a later batch.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one record with all `pairs`.")] = False,
) -> None:
    """Show what changed between two batches: broken, fixed, slower and faster kernels. Exit with 1 if one broke."""
    from kqueue.store.reports.changes import Change, changes

    with reading("compare") as read:
        found = read(changes, before, after)

    def show(found: Changes) -> None:
        listed = (Change.BROKE, Change.SLOWER, Change.FIXED, Change.FASTER)
        rows = [pair for change in listed for pair in found.pairs if pair.change is change]
        table(_CHANGES, empty="no kernel broke, was fixed, or became slower or faster")(rows)
        counts = ", ".join(f"{number} {change}" for change, number in found.counts.items())
        print(counts or "no problem is in both batches")
        print(f"geometric mean of the ratios: {ratio(found.mean) or 'unknown'}")
        print(f"problems of the first batch only: {found.only_first}, of the second only: {found.only_second}")

    def record(found: Changes) -> dict[str, Any]:
        pairs = [{"change": pair.change, "ratio": pair.ratio, **asdict(pair)} for pair in found.pairs]
        only = {"only_first": found.only_first, "only_second": found.only_second}
        return {"pairs": pairs, "counts": found.counts, "mean": found.mean, **only}

    emit(found, show, as_json=as_json, record=record)
    if Change.BROKE in found.counts:
        raise typer.Exit(1)


_CHANGES: Final[Columns[Pair]] = {
    "change": lambda pair: pair.change,
    "problem": lambda pair: pair.second.problem_label or pair.second.problem_hash[:12],
    "kernel": lambda pair: pair.label or pair.second.kernel_label,
    "first": lambda pair: str(pair.first.evaluation_id)[:8],
    "second": lambda pair: str(pair.second.evaluation_id)[:8],
    "category": lambda pair: category_text(str(pair.second.category), str(pair.second.category.blame)),
    "first speedup": lambda pair: _speedup(pair.first),
    "second speedup": lambda pair: _speedup(pair.second),
    "ratio": lambda pair: ratio(pair.ratio),
    "message": lambda pair: brief(pair.second.message, most=100),
}


# cancel ----------------------------------------------------------------------------------------------


def cancel(
    ids: options.Evaluations = None,
    batch: Annotated[str | None, typer.Option(help="All evaluations of this batch without a verdict.")] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD=VALUE", help=f"All of these without a verdict: {', '.join(_FIELDS)}. Repeatable."),
    ] = None,
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="All without a verdict that are older than 30m, 2h, 7d.")
    ] = None,
) -> None:
    """End evaluations as `cancelled`.

    Running ones are killed, and existing verdicts stay. All conditions must hold.
    """
    if not ids and batch is None and not where and older_than is None:
        raise InvalidRequest("name what to cancel: ids, --batch NAME, --where FIELD=VALUE or --older-than AGE")
    filters = conditions(where or (), {"batch": batch}, _FIELDS)
    before = None if older_than is None else figures.since(older_than, "--older-than")
    from kqueue.client import connect
    from kqueue.config import names_server
    from kqueue.store import reports

    if ids and (filters or before is not None):
        raise InvalidRequest("name ids or conditions, not both")
    with reading("cancel") as read:
        # All names are resolved before the first evaluation is cancelled, so that a typo cancels nothing. Evaluations
        # that are submitted meanwhile, for example by a producer that retries cancelled ones, are not included.
        named = list({read(reports.resolve_id, prefix) for prefix in ids or ()})
        chosen = named or read(reports.unfinished, before=before, **filters)
        if not chosen and batch is not None and read(reports.batch_state, batch) is None:
            raise UnknownEvaluation(batch, what="the batch")
    if names_server():
        with connect() as client, ThreadPoolExecutor() as pool:
            done = pool.map(client.cancel, chosen)
            cancelled = {one for one, ended in zip(chosen, done, strict=True) if ended}
    else:
        cancelled = _cancel(chosen)
    kept = len({*named} - cancelled)
    suffix = (
        f", {kept} had a verdict already" if kept else "" if chosen else ": no evaluation without a verdict matches"
    )
    typer.echo(f"cancelled {len(cancelled)}{suffix}")


def _cancel(chosen: Sequence[UUID]) -> set[UUID]:
    from kqueue import broker
    from kqueue.config import load
    from kqueue.store import evaluations

    cancelled: set[UUID] = set()
    app: Celery | None = None
    with database("cancel") as engine, ExitStack() as stack:
        for start in range(0, len(chosen), _CANCELLED):
            ended, running = evaluations.cancel_all(engine, chosen[start : start + _CANCELLED])
            cancelled |= ended
            audit.record(engine, "cancel", *map(str, ended))
            try:
                if running:
                    app = app or stack.enter_context(broker.make_app(load()))
                    broker.revoke(app, *running)
            except KqueueError as error:
                say(f"the workers of {len(running)} running evaluations could not be stopped: {error}")
    return cancelled


# cost ------------------------------------------------------------------------------------------------


def cost(
    by: Annotated[str, typer.Option(metavar="KEY", help="producer, batch, problem, lane or day.")] = "producer",
    since: Annotated[str, typer.Option(help="Such as 30m, 2h, 7d, or 2026-01-31 (UTC).")] = "1d",
    limit: Annotated[
        int, typer.Option(min=1, max=100_000, help="Maximum number of rows. The most expensive come first.")
    ] = 20,
    as_json: options.Json = False,
) -> None:
    """Show the cost of finished evaluations: time of slots, of exclusive devices and of CPUs, and waiting time."""
    after = figures.since(since)
    from kqueue.store import budgets
    from kqueue.store.reports import By
    from kqueue.store.reports import cost as costs

    if by not in list(By):
        raise InvalidRequest(f"--by {by}: use one of {', '.join(By)}")
    with reading("cost") as read:
        rows = first(read(costs, by=By(by), since=after, limit=limit + 1), limit)
        payers = {row.key: budgets.token_of(row.key) for row in rows if by == By.PRODUCER}
        known_budgets = read(budgets.of, {payer for payer in payers.values() if payer is not None})
    limits = {
        key: known_budgets[payer] for key, payer in payers.items() if payer is not None and payer in known_budgets
    }
    columns: Columns[Cost] = {by: lambda row: row.key or "-", **_COST}
    if limits:
        columns = {**columns, "budget": lambda row: budget(limits.get(row.key))}
    emit(
        rows,
        table(columns, empty="no evaluation has finished since then"),
        as_json=as_json,
        record=lambda row: {"by": by, **asdict(row), "budget": budget_record(limits.get(row.key))},
    )


_COST: Final[Columns[Cost]] = {
    **fields("evaluations passed reused fleet_failed attempts"),
    "slots s": lambda row: f"{row.slot_s:.1f}",
    "exclusive s": lambda row: f"{row.alone_s:.1f}",
    "CPU s": lambda row: f"{row.cpu_s:.1f}",
    "waited s": lambda row: f"{row.waited_s:.1f}",
}
