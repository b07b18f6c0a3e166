"""Evaluations that ended since a time: for counters, and with the times of their attempts for traces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Engine, cast, func, literal, select, tuple_
from sqlalchemy.dialects.postgresql import JSONPATH
from sqlalchemy.orm import aliased

from kqueue.categories import Blame, Category
from kqueue.states import Writer
from kqueue.store.engine import transaction
from kqueue.store.evaluations import ITS_KERNEL, REAL
from kqueue.store.models import Attempt, Environment, Evaluation, Kernel, Verdict, Worker
from kqueue.store.reports.row import Row, select_of, view
from kqueue.store.sql import any_uuid, columns, fetch, read

#: JSON path of the categories of earlier attempts in a verdict's evidence, without attempts that were handed back.
_FAILED: Final = "$.attempts[*] ? (!(@.handed_back == true)).category"
_ENDED: Final = "evaluation_id owner lane priority category written_by reused submitted_at finished_at "


@view(_ENDED + "begun_at durations_s built earlier")
class Ended(Row):
    """An evaluation with a verdict, for counters.

    Attributes:
        built: the process that compiled its extensions (:class:`kqueue.evidence.Build`), or None.
        earlier: the categories of the attempts before the last one, without those handed back.
    """

    begun_at: datetime | None
    durations_s: dict[str, float]
    built: str | None
    earlier: list[Category]
    category: Category
    finished_at: datetime


@dataclass(frozen=True, slots=True)
class Try:
    """One attempt.

    Attributes:
        number: from 1.
        device: a GPU's UUID, or ``cpu``.
        started_at, ended_at: UTC. The attempt of a cancelled evaluation is open until its worker ends it.
        category, written_by: its outcome, and the process that recorded it. None while it is open.
        handed_back: True if it was aborted because its worker was asked to stop.
        begun_s: start of each of its judge's steps, in seconds after its own start.
        durations_s: total seconds of each step.
    """

    number: int
    worker: str
    host: str
    device: str
    started_at: datetime
    ended_at: datetime | None
    category: Category | None
    written_by: Writer | None
    handed_back: bool
    begun_s: dict[str, float]
    durations_s: dict[str, float]


@view(_ENDED + "traceparent backend blame device tries")
class Course(Row):
    """An evaluation with a verdict, from its submission on, with its attempts and the producer's span."""

    traceparent: str | None
    category: Category
    blame: Blame
    finished_at: datetime
    tries: tuple[Try, ...]


def now(engine: Engine) -> datetime:
    """Return the time by the database's clock, UTC."""
    with transaction(engine) as connection:
        return connection.execute(select(func.clock_timestamp())).scalar_one()


def finished(engine: Engine, *, after: tuple[datetime, UUID], limit: int) -> list[tuple[UUID, datetime]]:
    """Return the ids of evaluations with verdicts and the times of these, in order of time.

    A verdict's time is the start of its transaction, so an earlier one can appear after a later one. A caller that
    polls must therefore start some seconds before its last result, and skip known evaluations. ``after`` is a time and
    an id, after which the result begins.
    """
    order = (Verdict.finished_at, Verdict.evaluation_id)
    query = select(Verdict.evaluation_id, Verdict.finished_at).order_by(*order).limit(limit)
    with transaction(engine) as connection:
        rows = connection.execute(query.where(tuple_(*order) > tuple_(*map(literal, after))))
        return [(row.evaluation_id, row.finished_at) for row in rows]


def ended(engine: Engine, ids: Collection[UUID]) -> list[Ended]:
    """Return evaluations that have ended. Probes and evaluations without a verdict are omitted."""
    first = select(Attempt.started_at).where(Attempt.evaluation_id == Evaluation.id, Attempt.number == 1)
    evidence: Any = Verdict.evidence
    query = (
        select(
            *select_of(
                Ended,
                Verdict,
                Evaluation,
                begun_at=first.scalar_subquery(),
                durations_s=func.coalesce(evidence["durations_s"], func.jsonb_build_object()),
                built=evidence["build"]["where"].astext,
                earlier=func.jsonb_path_query_array(evidence, cast(_FAILED, JSONPATH)),
            )
        )
        .join(Evaluation, Evaluation.id == Verdict.evaluation_id)
        .where(Verdict.evaluation_id == any_uuid(ids), REAL)
    )
    return fetch(engine, Ended, query)


def courses(engine: Engine, ids: Collection[UUID]) -> list[Course]:
    """Return the courses of evaluations. Probes and evaluations without a verdict are omitted."""
    final = aliased(Attempt)
    query = (
        select(*select_of(Course, Verdict, Evaluation, Kernel, Environment))
        .join(Evaluation, Evaluation.id == Verdict.evaluation_id)
        .join(Kernel, ITS_KERNEL)
        .outerjoin(final, final.id == Verdict.attempt_id)
        .outerjoin(Environment, Environment.hash == func.coalesce(Verdict.environment_hash, final.environment_hash))
        .where(Verdict.evaluation_id == any_uuid(ids), REAL)
    )
    outcome: Any = Attempt.outcome
    steps = {
        name: func.coalesce(outcome["evidence"][name], func.jsonb_build_object()) for name in ("begun_s", "durations_s")
    }
    attempts = (
        select(Attempt.evaluation_id, *columns(Try, Attempt, Worker, worker=Worker.name, **steps))
        .join(Worker, Worker.id == Attempt.worker_id)
        .where(Attempt.evaluation_id == any_uuid(ids))
        .order_by(Attempt.evaluation_id, Attempt.number)
    )
    tries: defaultdict[UUID, list[Try]] = defaultdict(list)
    with transaction(engine) as connection:
        rows = connection.execute(query).all()
        for row in connection.execute(attempts):
            tries[row.evaluation_id] += read(Try, [row])
    return [one for row in rows for one in read(Course, [row], tries=tuple(tries[row.evaluation_id]))]
