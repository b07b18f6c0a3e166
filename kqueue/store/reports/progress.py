"""The progress of evaluations."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

from sqlalchemy import Engine, and_, false, func, not_, or_, select, true

from kqueue.categories import Blame
from kqueue.contract import Request
from kqueue.errors import UnknownEvaluation
from kqueue.store.engine import transaction
from kqueue.store.evaluations import OPEN, QUEUED, asks_for
from kqueue.store.models import ME, Attempt, Evaluation, Verdict, Worker
from kqueue.store.reports.counts import among
from kqueue.store.reports.row import Row, select_of, view
from kqueue.store.sql import fetch


@view("evaluation_id state problem_label kernel_label device submitted_at started_at finished_at blame compiled")
class Progress(Row):
    """The progress of an evaluation. ``device`` and ``started_at`` are of its last attempt."""

    started_at: datetime | None


_LAST: Final = (
    select(Attempt.started_at, Worker.device)
    .join(Worker, Worker.id == Attempt.worker_id)
    .where(Attempt.evaluation_id == Evaluation.id)
    .order_by(Attempt.number.desc())
    .limit(1)
    .lateral()
)


_PROGRESS: Final = (
    select(*select_of(Progress, Evaluation, _LAST, Verdict))
    .select_from(Evaluation)
    .outerjoin(_LAST, true())
    .outerjoin(Verdict, Verdict.evaluation_id == Evaluation.id)
)


def progress(engine: Engine, evaluation_id: UUID) -> Progress:
    """Return the progress of an evaluation. Raise UnknownEvaluation if no evaluation has this id."""
    rows = fetch(engine, Progress, _PROGRESS.where(Evaluation.id == evaluation_id))
    if not rows:
        raise UnknownEvaluation(evaluation_id)
    return rows[0]


def progress_of_batch(engine: Engine, batch: str, *, done: bool, limit: int) -> list[Progress]:
    """Return the progress of a batch's evaluations with or without a verdict, the latest first."""
    mine = _PROGRESS.where(Evaluation.batch == batch, not_(OPEN) if done else OPEN)
    order = (Evaluation.submitted_at.desc(), Evaluation.id.desc())
    return fetch(engine, Progress, mine.order_by(*order).limit(limit))


def last_queued(engine: Engine, *, batches: Collection[str] = (), ids: Collection[UUID] = ()) -> UUID | None:
    """Return the last submitted one of the queued evaluations among these batches and ids."""
    with transaction(engine) as connection:
        return connection.scalar(
            select(Evaluation.id)
            .where(QUEUED, among(batches, ids))
            .order_by(Evaluation.submitted_at.desc(), Evaluation.id.desc())
            .limit(1)
        )


@dataclass(frozen=True, slots=True)
class Earlier:
    """The last evaluation of a request whose idempotency keys have a common prefix.

    Attributes:
        stands: True if a repeated request gets this evaluation, because it is open, or was answered recently without a
            failure of the fleet.
        same: False if it has other settings or another lane.
    """

    evaluation_id: UUID
    stands: bool
    same: bool


def earlier(engine: Engine, request: Request, *, family: str, within_s: float | None, any_lane: bool) -> Earlier | None:
    """Return the last evaluation of ``request``'s problem and kernel whose idempotency key begins with ``family``.

    Its answer stands for ``within_s`` seconds, or without limit. ``any_lane`` accepts any lane.
    """
    answered = Verdict.blame.in_([Blame.NONE.value, Blame.CANDIDATE.value, Blame.PROBLEM.value])
    if within_s is not None:
        answered = and_(answered, Verdict.finished_at >= func.now() - timedelta(seconds=within_s))
    with transaction(engine) as connection:
        row = connection.execute(
            select(
                Evaluation.id,
                Evaluation.problem_hash,
                Evaluation.kernel_hash,
                Evaluation.lane,
                Evaluation.settings,
                Evaluation.reuse,
                or_(OPEN, func.coalesce(answered, false())).label("stands"),
            )
            .outerjoin(Verdict, Verdict.evaluation_id == Evaluation.id)
            .where(
                Evaluation.owner == ME,
                Evaluation.problem_hash == request.problem_hash,
                Evaluation.kernel_hash == request.kernel_hash,
                Evaluation.idempotency_key.startswith(family, autoescape=True),
            )
            .order_by(Evaluation.submitted_at.desc(), Evaluation.id.desc())
            .limit(1)
        ).one_or_none()
    return None if row is None else Earlier(row.id, row.stands, asks_for(request, row, any_lane=any_lane))
