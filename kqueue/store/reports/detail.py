"""One evaluation in full."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Engine, case, select

from kqueue import contract
from kqueue.categories import Category
from kqueue.contract import Backend
from kqueue.errors import InvalidRequest, UnknownEvaluation
from kqueue.states import EvaluationState, Writer
from kqueue.store import evaluations
from kqueue.store.engine import transaction
from kqueue.store.models import Attempt, Environment, Evaluation, Kernel, Problem, Verdict, Worker
from kqueue.store.sql import read

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


@dataclass(frozen=True, slots=True)
class Detail:
    """One evaluation in full.

    Attributes:
        lane: the lane to which it was submitted.
        problem_label, problem_hash, problem: name, SHA-256 and source of the reference.
        kernel_label, kernel_hash, kernel: name, SHA-256 and source of the candidate.
        settings: the submitted :class:`kqueue.Settings` in JSON.
        batch: the producer's name for the batch.
        submitted_at, expires_at: UTC.
        verdict: the verdict. None while there is none.
    """

    evaluation_id: UUID
    state: EvaluationState
    lane: str
    backend: Backend
    problem_label: str | None
    problem_hash: str
    problem: str
    kernel_label: str | None
    kernel_hash: str
    kernel: str
    settings: Mapping[str, Any]
    batch: str | None
    submitted_at: datetime
    expires_at: datetime | None
    attempts: tuple[AttemptDetail, ...]
    verdict: contract.Verdict | None

    def request(self, **changes: Any) -> contract.Request:
        """Return a request to judge the same kernel in the same way, without a batch.

        Args:
            changes: different fields of the request.

        Raises:
            InvalidRequest: a field is wrong, or the settings are another version's.
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

    Raises:
        UnknownEvaluation: no id matches.
        InvalidRequest: several ids match, or ``prefix`` is neither an id nor a prefix of one.
    """
    digits = prefix.strip().lower().replace("-", "")
    if not _MIN_PREFIX <= len(digits) <= 32 or not set(digits) <= set("0123456789abcdef"):
        raise InvalidRequest(
            f"{prefix} is no evaluation's id: give an id, or at least its first {_MIN_PREFIX} digits (0-9, a-f). "
            "`kqueue results` lists the finished evaluations"
        )
    first, last = UUID(digits.ljust(32, "0")), UUID(digits.ljust(32, "f"))
    with transaction(engine) as connection:
        ids = connection.scalars(select(Evaluation.id).where(Evaluation.id.between(first, last)).limit(2)).all()
    if not ids:
        raise UnknownEvaluation(prefix)
    if len(ids) > 1:
        raise InvalidRequest(f"several evaluations begin with {prefix}: give more of the id")
    return ids[0]


def show(engine: Engine, evaluation_id: UUID) -> Detail:
    """Return one evaluation in full.

    Raises:
        UnknownEvaluation: no evaluation has this id.
    """
    with transaction(engine) as connection:
        row = connection.execute(
            select(
                Evaluation.id.label("evaluation_id"),
                Evaluation.state,
                Evaluation.lane,
                Evaluation.problem_label,
                Evaluation.problem_hash,
                Evaluation.kernel_label,
                Evaluation.kernel_hash,
                Evaluation.settings,
                Evaluation.batch,
                Evaluation.submitted_at,
                Evaluation.expires_at,
                Problem.source.label("problem"),
                Kernel.source.label("kernel"),
                Kernel.backend,
            )
            .join(Problem, Problem.hash == Evaluation.problem_hash)
            .join(Kernel, Kernel.hash == Evaluation.kernel_hash)
            .where(Evaluation.id == evaluation_id)
        ).one_or_none()
        if row is None:
            raise UnknownEvaluation(evaluation_id)
        attempts = connection.execute(
            select(
                Attempt.number,
                Worker.name.label("worker"),
                Attempt.started_at,
                Attempt.ended_at,
                case((Attempt.ended_at.is_(None), Attempt.step)).label("step"),
                Attempt.category,
                Attempt.message,
                Attempt.outcome["phase"].astext.label("phase"),
                Attempt.written_by,
                Environment.facts.label("environment"),
            )
            .join(Worker, Worker.id == Attempt.worker_id)
            .outerjoin(Environment, Environment.hash == Attempt.environment_hash)
            .where(Attempt.evaluation_id == evaluation_id)
            .order_by(Attempt.number)
        ).all()
        verdict = (
            connection.execute(evaluations.VERDICTS.where(Verdict.evaluation_id == evaluation_id))
            .mappings()
            .one_or_none()
        )
    [detail] = read(
        Detail,
        [row],
        attempts=read(AttemptDetail, attempts),
        verdict=None if verdict is None else evaluations.to_verdict(verdict),
    )
    return detail
