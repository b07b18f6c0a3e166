"""One evaluation in full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Connection, Engine, case, select

from kqueue import contract, shapes
from kqueue.categories import Category
from kqueue.errors import InvalidRequest, UnknownEvaluation
from kqueue.states import ArtifactName, EvaluationState, Writer
from kqueue.store import callbacks, evaluations, models
from kqueue.store.callbacks import CallbackState
from kqueue.store.engine import transaction
from kqueue.store.evaluations import ITS_KERNEL, ITS_PROBLEM
from kqueue.store.models import Attempt, Environment, Kernel, Problem, SearchRun, Verdict, Worker
from kqueue.store.reports.row import Row, select_of, view
from kqueue.store.reports.waiting import Waiting, waiting
from kqueue.store.sql import columns, read

#: Minimum number of hexadecimal digits that identify an evaluation.
_MIN_PREFIX: Final = 4


@dataclass(frozen=True, slots=True)
class AttemptDetail:
    """One attempt of an evaluation.

    Attributes:
        number: from 1.
        worker: the worker's node name.
        started_at: UTC.
        ended_at: None while it runs.
        step: its current step, named as in ``evidence.durations_s``, if it has run for more than a second.
        category: its outcome. None while it runs.
        message: one line about the outcome.
        phase: the phase in which it ended, according to the status page if its judge died.
        written_by: the process that recorded the outcome.
        environment: the facts of its environment. None if it ended before they were recorded.
    """

    number: int
    worker: str
    started_at: datetime
    ended_at: datetime | None
    step: str | None
    category: Category | None
    message: str | None
    phase: str | None
    written_by: Writer | None
    environment: Mapping[str, Any] | None


@view(
    "evaluation_id state owner lane backend problem_label problem_hash kernel_label kernel_hash settings batch"
    " submitted_at expires_at attempts waiting verdict callbacks"
)
class Evaluation(Row):
    """One evaluation with all fields except its sources.

    Attributes:
        lane: the lane to which it was submitted.
        settings: the submitted :class:`kqueue.Settings` in JSON.
        submitted_at, expires_at: UTC.
        attempts: its attempts so far.
        waiting: reason and duration of the wait while it is queued, or runs but another fleet has its device. Else
            None.
        verdict: the verdict. None while there is none.
        callbacks: the state of its callback, if it has one.
    """

    settings: Mapping[str, Any]
    expires_at: datetime | None
    attempts: tuple[AttemptDetail, ...]
    waiting: Waiting | None
    verdict: contract.Verdict | None
    callbacks: tuple[CallbackState, ...]


@view("problem kernel algorithm")
class Detail(Evaluation):
    """One evaluation in full.

    Attributes:
        problem, kernel: its sources, without shapes that are held out.
        algorithm: algorithm of the recorded search that made it. None for other work.
    """

    algorithm: str | None

    def files(self) -> dict[ArtifactName, str]:
        """Return its files by name: the sources, and with a verdict all."""
        files = {ArtifactName.PROBLEM: self.problem, ArtifactName.KERNEL: self.kernel}
        if self.verdict is not None:
            files[ArtifactName.VERDICT] = self.verdict.model_dump_json(indent=2)
            files[ArtifactName.EVIDENCE] = self.verdict.evidence.model_dump_json(indent=2)
            files[ArtifactName.LOG] = self.verdict.log
        return files

    def request(self, **changes: Any) -> contract.Request:
        """Return a request to judge the same kernel in the same way, without a batch.

        ``changes`` are other values of its fields. Raise InvalidRequest if one is wrong, or the settings are another
        version's.
        """
        same = {
            "problem": self.problem,
            "kernel": self.kernel,
            "backend": self.backend,
            "lane": self.lane,
            "settings": self.settings,
            "problem_label": self.problem_label,
            "kernel_label": self.kernel_label,
        }
        return contract.parse_request(same | changes)


def resolve_id(engine: Engine, prefix: str) -> UUID:
    """Return the evaluation whose id is ``prefix``, or the only one whose id begins with it (at least four digits).

    Raise InvalidRequest if several ids match, or ``prefix`` is neither an id nor a prefix of one.
    """
    digits = prefix.strip().lower().replace("-", "")
    if not _MIN_PREFIX <= len(digits) <= 32 or not set(digits) <= set("0123456789abcdef"):
        raise InvalidRequest(
            f"{prefix} is no evaluation's id: give an id, or at least its first {_MIN_PREFIX} digits (0-9, a-f). "
            "`kqueue results` lists the finished evaluations"
        )
    with transaction(engine) as connection:
        ids = ids_beginning(connection, digits)
    if not ids:
        raise UnknownEvaluation(prefix)
    if len(ids) > 1:
        raise InvalidRequest(f"several evaluations begin with {prefix}: give more of the id")
    return ids[0]


def ids_beginning(connection: Connection, digits: str) -> Sequence[UUID]:
    """Return the first two evaluations whose ids begin with these hexadecimal digits."""
    known, first, last = models.Evaluation.id, UUID(digits.ljust(32, "0")), UUID(digits.ljust(32, "f"))
    return connection.scalars(select(known).where(known.between(first, last)).limit(2)).all()


def show(engine: Engine, evaluation_id: UUID, *, within_s: float | None = None) -> Detail:
    """Return one evaluation with its attempts and its verdict, or the reason why it waits.

    A worker counts as alive for ``within_s`` seconds without a heartbeat. None returns no reason of a wait. Raise
    UnknownEvaluation if no evaluation has this id.
    """
    run = select(SearchRun.plan["algorithm"].astext).where(SearchRun.name == models.Evaluation.batch)
    with transaction(engine) as connection:
        row = connection.execute(
            select(*select_of(Detail, models.Evaluation, Kernel, algorithm=run.scalar_subquery()))
            .join(Problem, ITS_PROBLEM)
            .join(Kernel, ITS_KERNEL)
            .where(models.Evaluation.id == evaluation_id)
        ).one_or_none()
        if row is None:
            raise UnknownEvaluation(evaluation_id)
        attempts = connection.execute(
            select(
                *columns(
                    AttemptDetail,
                    Attempt,
                    worker=Worker.name,
                    step=case((Attempt.ended_at.is_(None), Attempt.step)),
                    phase=Attempt.outcome["phase"].astext,
                    environment=Environment.facts,
                )
            )
            .join(Worker, Worker.id == Attempt.worker_id)
            .outerjoin(Environment, Environment.hash == Attempt.environment_hash)
            .where(Attempt.evaluation_id == evaluation_id)
            .order_by(Attempt.number)
        ).all()
        verdicts = connection.execute(evaluations.VERDICTS.where(Verdict.evaluation_id == evaluation_id)).mappings()
        verdict = next(map(evaluations.to_verdict, verdicts), None)
    reason = None
    if within_s is not None and row.state != EvaluationState.DONE:
        reason = waiting(engine, evaluation_id, within_s=within_s)
    # The row's own `attempts` is their number.
    parts = {"attempts": read(AttemptDetail, attempts), "waiting": reason, "verdict": verdict}
    calls = callbacks.states(engine, evaluation_id=evaluation_id)
    [detail] = read(Detail, [row], problem=shapes.public(row.problem), callbacks=calls, **parts)
    return detail
