"""`kqueue status`, `show`, `results` and `cancel`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from kqueue import moments
from kqueue.cli.connection import database
from kqueue.errors import InvalidRequest, KqueueError, UnknownEvaluation
from kqueue.states import EvaluationState, Priority

if TYPE_CHECKING:
    from uuid import UUID

    from celery import Celery
    from rich.text import Text
    from sqlalchemy import Engine

    from kqueue.contract import Outcome, Verdict
    from kqueue.evidence import Environment, Measurement
    from kqueue.store.gpus import GpuStatus
    from kqueue.store.reports import Detail, Listed, Waiting
    from kqueue.store.workers import LiveWorker

#: Fields that select evaluations.
_FIELDS: Final = ("backend", "problem", "batch", "lane", "priority", "producer")
#: Fields that select finished evaluations.
_WHERE: Final = ("category", "blame", *_FIELDS)
#: Maximum number of evaluations that are cancelled in one statement, which takes a second.
_CANCELLED: Final = 1000
#: Maximum number of producers in `status`.
_CROWDS: Final = 20
#: Facts and evidence that `show` prints separately.
_APART: Final = {"findings", "provenance", "sanitized", "profile"}
#: Maximum number of lines of the log that `show` prints without `--log`.
_LOG_LINES: Final = 20
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON record on each line.")]
_Where = Annotated[list[str] | None, typer.Option(metavar="FIELD=VALUE", help=f"{', '.join(_WHERE)}. Repeatable.")]
_Kind = TypeVar("_Kind", bound=StrEnum)


# status ----------------------------------------------------------------------------------------------


def status(as_json: _Json = False) -> None:
    """Show the queue, the workers, paused devices, and the last hour.

    Exits with 3 if Redis cannot be reached.
    """
    from kqueue.cli.render import write_json
    from kqueue.config import load

    config = load()
    config.require_database()  # report it before slow imports
    from kqueue import broker
    from kqueue.cli.probe import last_day
    from kqueue.store import gpus, reports, workers

    with database("status") as engine:
        lanes: dict[str, dict[str, int]] = {
            name: {**states, "workers": 0} for name, states in reports.states(engine).items()
        }
        live = workers.live(engine, within_s=config.live_s)
        gpus_known = gpus.find(engine)
        outcomes = reports.outcomes(engine, since=datetime.now(UTC) - timedelta(hours=1))
        crowds = reports.crowds(engine)
        probes = last_day(engine, config)
    for worker in live:
        for lane in worker.lanes:
            lanes.setdefault(lane, {**dict.fromkeys(EvaluationState, 0), "workers": 0})["workers"] += 1
    blames: dict[str, int] = {}
    for category, count in outcomes.items():
        blames[category.blame] = blames.get(category.blame, 0) + count
    failure = None
    try:
        broker.check(broker.make_app(config))
    except KqueueError as error:
        failure = str(error)
    record = {
        "lanes": lanes,
        "queued": [asdict(crowd) for crowd in crowds],
        "workers": [asdict(worker) for worker in live],
        "gpus_not_serving": [asdict(gpu) for gpu in gpus_known if gpu.paused is not None],
        "gpu_memory": list(_gpu_memory(gpus_known, live)),
        "probes": probes,
        "last_hour": {"by_blame": blames, "by_category": {str(name): count for name, count in outcomes.items()}},
        "broker": {"reachable": failure is None, "error": failure},
    }
    if as_json:
        write_json(record)
    else:
        _print_status(record)
    if failure is not None:
        raise typer.Exit(3)


def _gpu_memory(statuses: Iterable[GpuStatus], live: Sequence[LiveWorker]) -> Iterator[dict[str, Any]]:
    """Yield the booked memory of each GPU, and its waiting processes. GPUs without a live worker are omitted."""
    devices = {worker.device for worker in live}
    busy = {worker.name: worker.busy_with for worker in live}
    for gpu in statuses:
        if gpu.memory is not None and gpu.uuid in devices:
            record = {"uuid": gpu.uuid, "host": gpu.host, "index": gpu.index, **asdict(gpu.memory)}
            record["waiting"] = [
                {**asdict(one), "evaluation": busy.get(f"{one.label}@{gpu.host}")} for one in gpu.memory.waiting
            ]
            yield record


def _print_status(record: Mapping[str, Any]) -> None:
    from kqueue.categories import Category
    from kqueue.cli.probe import print_last_day
    from kqueue.cli.render import age, category_text, console, print_table, step, text

    lanes, live = record["lanes"], record["workers"]
    columns = (*EvaluationState, "workers")
    if lanes:
        rows = ((name, *(lanes[name][column] for column in columns)) for name in sorted(lanes))
        print_table(("lane", *columns), rows, title="queue")
    else:
        console().print("queue: empty, and no worker is alive")
    if record["queued"]:
        rows = (
            (crowd["lane"], crowd["priority"], crowd["producer"] or "-", crowd["queued"], f"for {age(crowd['since'])}")
            for crowd in record["queued"][:_CROWDS]
        )
        print_table(("lane", "priority", "producer", "queued", "oldest"), rows, title="queued by producer")
    if live:
        rows = (
            (
                worker["name"],
                worker["device"],
                " ".join(worker["lanes"]),
                worker["busy_with"] or "idle",
                f"for {age(worker['busy_since'])}" if worker["busy_since"] else "",
                step(worker["step"]),
                text(worker["paused"] or "", "yellow"),
            )
            for worker in live
        )
        print_table(("worker", "device", "lanes", "busy with", "since", "step", "paused"), rows, title="workers")
    _print_kept_waiting(live)
    _print_waiting(record["gpu_memory"])
    for gpu in record["gpus_not_serving"]:
        message = f"GPU {gpu['index']} of {gpu['host']} is out of service since {age(gpu['since'])}: {gpu['state']}"
        console().print(text(message + (f", {gpu['reason']}" if gpu["reason"] else ""), "yellow"))
    print_last_day(record["probes"])
    counted = record["last_hour"]["by_category"]
    if counted:
        rows = ((category_text(name, Category(name).blame), Category(name).blame, n) for name, n in counted.items())
        print_table(("outcome", "blame", "n"), rows, title="the last hour")
    broker = record["broker"]
    if broker["reachable"]:
        console().print("redis: reachable")
    else:
        console().print(text(f"redis: {broker['error']}", "bold red"))


def _print_kept_waiting(live: Iterable[Mapping[str, Any]]) -> None:
    from kqueue.cli.render import age, print_table

    rows = [
        (
            worker["name"],
            worker["device"],
            worker["busy_with"],
            f"for {age(worker['waits_since'])}",
            worker["waits_for"],
        )
        for worker in live
        if worker["waits_for"] is not None
    ]
    if rows:
        columns = ("worker", "device", "evaluation", "since", "held by")
        print_table(columns, rows, title="waiting for a device")


def _print_waiting(gpus: Iterable[Mapping[str, Any]]) -> None:
    from kqueue.cli.render import age, gib, print_table

    rows = [
        (
            f"{gpu['index']} of {gpu['host']}",
            f"{gib(gpu['booked_bytes'])} of {gib(gpu['capacity_bytes'])}",
            one["label"],
            one["evaluation"],
            gib(one["wanted_bytes"]),
            f"for {age(one['since'])}",
        )
        for gpu in gpus
        for one in gpu["waiting"]
    ]
    if rows:
        columns = ("gpu", "booked GiB", "waiting", "evaluation", "for GiB", "since")
        print_table(columns, rows, title="waiting for GPU memory")


# cost ------------------------------------------------------------------------------------------------


def cost(
    by: Annotated[str, typer.Option(metavar="KEY", help="producer, batch, problem, lane or day.")] = "producer",
    since: Annotated[str, typer.Option(help="Such as 30m, 2h, 7d, or 2026-01-31 (UTC).")] = "1d",
    limit: Annotated[
        int, typer.Option(min=1, max=100_000, help="Maximum number of rows. The most expensive come first.")
    ] = 20,
    as_json: _Json = False,
) -> None:
    """Show the cost of finished evaluations: time of slots, of exclusive devices and of CPUs, and waiting time."""
    from kqueue.cli.render import budget, print_table, write_json
    from kqueue.cli.token import budget_record

    after = moments.since(since)
    from kqueue.store import budgets
    from kqueue.store.reports import By
    from kqueue.store.reports import cost as costs

    if by not in list(By):
        raise InvalidRequest(f"--by {by}: use one of {', '.join(By)}")
    with database("cost") as engine:
        rows = costs(engine, by=By(by), since=after, limit=limit)
        payers = {row.key: budgets.token_of(row.key) for row in rows if by == By.PRODUCER}
        known_budgets = budgets.of(engine, {payer for payer in payers.values() if payer is not None})
    limits = {
        key: known_budgets[payer] for key, payer in payers.items() if payer is not None and payer in known_budgets
    }
    if as_json:
        for row in rows:
            write_json({"by": by, **asdict(row), "budget": budget_record(limits.get(row.key))})
        return
    if not rows:
        typer.echo("no evaluation has finished since then")
        return
    columns = (
        by,
        "evaluations",
        "passed",
        "reused",
        "fleet failed",
        "attempts",
        "slots s",
        "exclusive s",
        "CPU s",
        "waited s",
    )
    print_table(
        (*columns, "budget") if limits else columns,
        (
            (
                row.key or "-",
                row.evaluations,
                row.passed,
                row.reused,
                row.fleet_failed,
                row.attempts,
                *(f"{seconds:.1f}" for seconds in (row.slot_s, row.alone_s, row.cpu_s, row.waited_s)),
                *([budget(limits.get(row.key))] if limits else []),
            )
            for row in rows
        ),
    )


# show ------------------------------------------------------------------------------------------------


def show(
    evaluation: Annotated[str, typer.Argument(metavar="ID", help="An evaluation's id, or its first digits.")],
    as_json: _Json = False,
    source: Annotated[bool, typer.Option("--source", help="Show the sources too.")] = False,
    log: Annotated[bool, typer.Option("--log", help="Show the whole stored log.")] = False,
) -> None:
    """Show one evaluation.

    It prints settings, attempts, verdict, times, facts, evidence and the end of the log.
    """
    from kqueue.cli.render import write_json
    from kqueue.store import reports

    with database("show") as engine:
        detail = reports.show(engine, reports.resolve_id(engine, evaluation))
        waits = why(engine, detail.evaluation_id) if detail.state != EvaluationState.DONE else None
    if as_json:
        record = asdict(detail) | {"waiting": waits and asdict(waits)}
        if not source:
            del record["problem"], record["kernel"]
        if detail.verdict is not None:
            record["verdict"] = detail.verdict.model_dump(mode="json") | detail.verdict.summary()
        write_json(record)
        return
    _print_head(detail, "" if waits is None else waits.message)
    _print_attempts(detail)
    if detail.verdict is not None:
        _print_verdict(detail.verdict, all_of_log=log)
    if source:
        _print_block("problem", detail.problem)
        _print_block("kernel", detail.kernel)


def _print_fields(fields: Iterable[tuple[str, object]]) -> None:
    """Print names and values in two columns. Empty values are omitted."""
    from kqueue.cli.render import console
    from kqueue.text import one_line

    out = console()
    for name, value in fields:
        if value is not None and value != "":
            out.print(f"{name:<11}", end="", style="bold")
            out.print(one_line(value), soft_wrap=True)


def _print_block(title: str, lines: str) -> None:
    from kqueue.cli.render import console
    from kqueue.text import clean

    out = console()
    out.print(f"--- {title}", style="bold")
    out.print(clean(lines.rstrip("\n")), soft_wrap=True)


def why(engine: Engine, evaluation_id: UUID) -> Waiting | None:
    """Return the reason why an evaluation waits, or None if it does not."""
    from kqueue.config import load
    from kqueue.store import reports

    return reports.waiting(engine, evaluation_id, within_s=load().live_s)


def _print_head(detail: Detail, waits: str) -> None:
    from kqueue.cli.render import moment

    _print_fields(
        (
            ("evaluation", detail.evaluation_id),
            ("state", detail.state),
            ("waits", waits),
            ("problem", f"{detail.problem_label or ''} {detail.problem_hash[:12]}"),
            ("kernel", f"{detail.kernel_label or ''} {detail.kernel_hash[:12]} ({detail.backend})"),
            ("lane", detail.lane),
            ("batch", detail.batch),
            ("settings", shown_settings(detail.settings)),
            ("submitted", moment(detail.submitted_at)),
            ("expires", moment(detail.expires_at) if detail.state == EvaluationState.QUEUED else ""),
        )
    )


def shown_settings(settings: Mapping[str, Any]) -> str:
    """Return precision, checks, and all settings that differ from the default."""
    from kqueue.contract import Settings

    default = dict(_flat(Settings().model_dump(mode="json")))
    shown = {"precision", "checks"}
    return " ".join(
        f"{name}={value}" for name, value in _flat(settings) if name in shown or default.get(name, ...) != value
    )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _print_attempts(detail: Detail) -> None:
    from kqueue.cli.render import category_text, moment, print_table

    if not detail.attempts:
        return
    rows = (
        (
            attempt.number,
            attempt.worker,
            (attempt.environment or {}).get("device"),
            moment(attempt.started_at),
            f"{(attempt.ended_at - attempt.started_at).total_seconds():.2f}" if attempt.ended_at else "",
            category_text(attempt.category, attempt.category.blame) if attempt.category else "running",
            attempt.message,
        )
        for attempt in detail.attempts
    )
    print_table(("attempt", "worker", "device", "started", "took s", "category", "message"), rows)


def _print_verdict(verdict: Verdict, *, all_of_log: bool) -> None:
    from kqueue.cli.render import moment

    print_result(
        verdict,
        [
            ("finished", f"{moment(verdict.finished_at)}, written by {verdict.written_by}"),
            ("reused", verdict.reused_from and f"from {verdict.reused_from}, judged {moment(verdict.judged_at)}"),
            *environment_fields(verdict.environment),
        ],
        all_of_log=all_of_log,
    )


def environment_fields(environment: Environment | None) -> Iterator[tuple[str, str]]:
    """Yield the names and values of a result's environment."""
    for name, value in (environment.model_dump() if environment else {}).items():
        if value is not None:
            yield f"  {name}", _value(value)


def print_result(
    result: Outcome | Verdict, fields: Iterable[tuple[str, object]], *, all_of_log: bool, evidence: bool = True
) -> None:
    """Print the result of one kernel.

    Args:
        fields: further names and values to print.
        all_of_log: print the whole log, not only its last lines.
        evidence: print all evidence too.
    """
    from kqueue import examinations
    from kqueue.cli.render import category_text, console, finding, provenance, ratio, yes_no

    console().print(category_text(result.category, result.blame), end="")
    console().print(f"  blame: {result.blame}")
    _print_fields(
        (
            ("message", result.message),
            ("phase", result.phase),
            ("compiled", yes_no(result.compiled)),
            ("correct", yes_no(result.correctness)),
            ("runtime", _measurement(result.runtime)),
            ("baseline", _measurement(result.baseline)),
            ("speedup", ratio(result.speedup)),
            ("provenance", provenance(result.evidence.provenance)),
            *fields,
        )
    )
    if tools := "\n".join(examinations.lines(result.evidence)):
        _print_block("tools", tools)
    # Findings that ended the evaluation are among its facts.
    if findings := result.evidence.findings or result.facts.findings:
        _print_block("findings", "\n".join(map(finding, findings)))
    for title, part in (("facts", result.facts), ("evidence", result.evidence if evidence else None)):
        values = part.model_dump(mode="json", exclude=_APART) if part else {}
        if values:
            _print_block(title, "\n".join(f"{name}: {_value(value)}" for name, value in values.items()))
    lines = result.log.splitlines()
    if lines and all_of_log:
        _print_block("log", result.log)
    elif lines:
        left_out = f", the last {_LOG_LINES} of {len(lines)} lines (--log for all)" if len(lines) > _LOG_LINES else ""
        _print_block(f"log{left_out}", "\n".join(lines[-_LOG_LINES:]))


def _measurement(taken: Measurement | None) -> str:
    from kqueue.cli.render import milliseconds as ms

    if taken is None:
        return ""
    return (
        f"{ms(taken.median_ms)} ms, quartiles {ms(taken.q1_ms)} to {ms(taken.q3_ms)}, {taken.count} calls, "
        f"{'cold' if taken.cold_l2 else 'warm'} L2, {ms(taken.null_ms)} ms launch overhead subtracted, "
        f"basis {taken.basis}"
    )


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


# results ---------------------------------------------------------------------------------------------


def results(
    where: _Where = None,
    state: Annotated[EvaluationState, typer.Option(help="Only evaluations in this state.")] = EvaluationState.DONE,
    problem: Annotated[str | None, typer.Option(help="A problem's label, or the first digits of its hash.")] = None,
    since: Annotated[str | None, typer.Option(help="Such as 30m, 2h, 7d, or 2026-01-31 (UTC).")] = None,
    batch: Annotated[str | None, typer.Option(help="The name of a batch.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="Maximum number of evaluations.")] = 50,
    as_json: _Json = False,
) -> None:
    """List evaluations, the latest first. Only finished ones are listed unless another state is given."""
    from kqueue.cli.render import print_table, write_json

    filters = _filters(where or (), {"problem": problem, "batch": batch})
    after = None if since is None else moments.since(since)
    from kqueue.store import reports  # slow to import, so invalid conditions are refused first

    with database("results") as engine:
        if state is EvaluationState.DONE:
            listed_rows = reports.results(engine, since=after, limit=limit, **filters)
        else:
            listed_rows = reports.listing(engine, state=state, since=after, limit=limit, **filters)
    if as_json:
        for result in listed_rows:
            write_json(asdict(result))
        return
    if not listed_rows:
        typer.echo(f"no {'finished' if state is EvaluationState.DONE else state} evaluation matches")
        return
    if state is not EvaluationState.DONE:
        print_table(
            ("id", "age", "problem", "kernel", "backend", "lane", "priority", "producer", "batch"),
            (_open(listed) for listed in listed_rows),
        )
        return
    print_table(
        (
            "id",
            "age",
            "problem",
            "kernel",
            "backend",
            "category",
            "runtime ms",
            "baseline ms",
            "speedup",
            "device",
            "message",
        ),
        (_result(listed) for listed in listed_rows),
    )


def _open(listed: Listed) -> tuple[str | None, ...]:
    """Return an evaluation without a verdict as a row of the table."""
    from kqueue.cli.render import age

    return (
        str(listed.evaluation_id)[:8],
        age(listed.submitted_at),
        listed.problem_label or listed.problem_hash[:12],
        listed.kernel_label or listed.kernel_hash[:12],
        listed.backend,
        listed.lane,
        listed.priority,
        listed.producer,
        listed.batch,
    )


def _result(listed: Listed) -> tuple[str | Text | None, ...]:
    """Return a finished evaluation as a row of the table."""
    from kqueue.cli.render import age, category_text, milliseconds, ratio

    assert listed.category is not None, "it is finished"
    assert listed.finished_at is not None, "it is finished"
    return (
        str(listed.evaluation_id)[:8],
        age(listed.finished_at),
        listed.problem_label or listed.problem_hash[:12],
        listed.kernel_label or listed.kernel_hash[:12],
        listed.backend,
        category_text(listed.category, listed.category.blame),
        milliseconds(listed.runtime_ms),
        milliseconds(listed.baseline_ms),
        ratio(listed.speedup),
        listed.device,
        message_cell(listed.message, listed.reused_from)[:100],
    )


def message_cell(message: str | None, reused_from: object) -> str:
    """Return a verdict's message for a table, with the origin of a reused verdict."""
    reused = f"reused from {str(reused_from)[:8]}" if reused_from else ""
    return ". ".join(filter(None, (reused, message)))


def _filters(where: Iterable[str], options: Mapping[str, str | None], among: Sequence[str] = _WHERE) -> dict[str, Any]:
    """Return the conditions as :class:`kqueue.store.reports.Filters`."""
    from kqueue.categories import Blame, Category
    from kqueue.contract import Backend

    asked: dict[str, Any] = {**_conditions(where, options, among)}
    kinds: dict[str, type[StrEnum]] = {"category": Category, "blame": Blame, "backend": Backend, "priority": Priority}
    for field in asked.keys() & kinds.keys():
        kind = kinds[field]
        fix = "see `kqueue categories`" if kind is Category else f"use one of {', '.join(kind)}"
        asked[field] = _one_of(kind, asked[field], field, fix)
    return asked


def _conditions(where: Iterable[str], options: Mapping[str, str | None], among: Sequence[str]) -> dict[str, str]:
    """Return the conditions by field. Fields are restricted to ``among``."""
    asked = {name: value for name, value in options.items() if value is not None}
    for condition in where:
        field, mark, value = condition.partition("=")
        if field not in among:
            raise InvalidRequest(f"--where {condition}: no field {field!r}. The fields are {', '.join(among)}")
        if not mark or not value:
            raise InvalidRequest(f"--where {condition}: write {field}=VALUE")
        if field in asked:
            raise InvalidRequest(f"--where {condition}: {field} is given twice")
        asked[field] = value
    return asked


def _one_of(kind: type[_Kind], value: str, field: str, fix: str) -> _Kind:
    try:
        return kind(value)
    except ValueError:
        raise InvalidRequest(f"unknown {field} {value!r}: {fix}") from None


# cancel ----------------------------------------------------------------------------------------------


def cancel(
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="Ids, or their first digits.")] = None,
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
    filters = _filters(where or (), {"batch": batch}, _FIELDS)
    before = None if older_than is None else moments.since(older_than, "--older-than")
    from kqueue import broker
    from kqueue.cli.render import say
    from kqueue.config import load
    from kqueue.store import evaluations, reports

    if ids and (filters or before is not None):
        raise InvalidRequest("name ids or conditions, not both")
    cancelled: set[UUID] = set()
    app: Celery | None = None
    with database("cancel") as engine, ExitStack() as stack:
        # All names are resolved before the first evaluation is cancelled, so that a typo cancels nothing. Evaluations
        # that are submitted meanwhile, for example by a producer that retries cancelled ones, are not included.
        named = list({reports.resolve_id(engine, prefix) for prefix in ids or ()})
        chosen = named or reports.unfinished(engine, before=before, **filters)
        if not chosen and batch is not None and reports.batch_state(engine, batch) is None:
            raise UnknownEvaluation(batch, what="the batch")
        for start in range(0, len(chosen), _CANCELLED):
            ended, running = evaluations.cancel_all(engine, chosen[start : start + _CANCELLED])
            cancelled |= ended
            try:
                if running:
                    app = app or stack.enter_context(broker.make_app(load()))
                    broker.revoke(app, *running)
            except KqueueError as error:
                say(f"the workers of {len(running)} running evaluations could not be stopped: {error}")
    kept = len({*named} - cancelled)
    suffix = (
        f", {kept} had a verdict already" if kept else "" if chosen else ": no evaluation without a verdict matches"
    )
    typer.echo(f"cancelled {len(cancelled)}{suffix}")
