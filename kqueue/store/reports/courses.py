"""The times at which ended evaluations were submitted, published, claimed and finished."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Engine, func, select
from sqlalchemy.orm import aliased

from kqueue.categories import Blame, Category
from kqueue.states import Priority, Writer
from kqueue.store.engine import transaction
from kqueue.store.evaluations import ITS_KERNEL, REAL
from kqueue.store.models import Attempt, Environment, Evaluation, Kernel, Verdict, Worker
from kqueue.store.sql import any_uuid, columns, read


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


@dataclass(frozen=True, slots=True)
class Course:
    """An evaluation with a verdict, from its submission on.

    Attributes:
        owner: the owner of the evaluation.
        traceparent: the producer's span (:mod:`kqueue.tracing`), or None.
        submitted_at, finished_at: UTC.
        category, blame, written_by: the verdict, and the process that recorded it.
        reused: True if the verdict was reused from an equal evaluation.
        model: the GPU's or CPU's name. None if no judge recorded it.
    """

    evaluation_id: UUID
    owner: str
    traceparent: str | None
    lane: str
    priority: Priority
    backend: str
    submitted_at: datetime
    finished_at: datetime
    category: Category
    blame: Blame
    written_by: Writer
    reused: bool
    model: str | None
    tries: tuple[Try, ...]


def courses(engine: Engine, ids: Collection[UUID]) -> list[Course]:
    """Return the courses of evaluations. Probes and evaluations without a verdict are omitted."""
    final = aliased(Attempt)
    query = (
        select(
            *columns(
                Course,
                Verdict,
                Evaluation,
                Kernel,
                reused=Verdict.reused_from.is_not(None),
                model=Environment.device,
            )
        )
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
