"""Reading verdicts and ids."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Engine, RowMapping, func, select

from kqueue import contract
from kqueue.errors import UnknownEvaluation
from kqueue.store.engine import transaction
from kqueue.store.models import Attempt, Environment, Evaluation, Kernel, Verdict
from kqueue.store.sql import any_uuid

#: One row for each verdict, as :func:`to_verdict` reads it.
VERDICTS: Final = (
    select(
        Evaluation.id,
        Evaluation.problem_label,
        Evaluation.kernel_label,
        Evaluation.lane,
        Evaluation.attempts,
        Evaluation.submitted_at,
        Kernel.backend,
        Environment.facts.label("environment"),
        Verdict.category,
        Verdict.message,
        Verdict.phase,
        Verdict.facts,
        Verdict.runtime,
        Verdict.baseline,
        Verdict.log,
        Verdict.evidence,
        Verdict.written_by,
        Verdict.finished_at,
        Verdict.reused_from,
        Verdict.judged_at,
    )
    .join(Evaluation, Evaluation.id == Verdict.evaluation_id)
    .join(Kernel, Kernel.hash == Evaluation.kernel_hash)
    .outerjoin(Attempt, Attempt.id == Verdict.attempt_id)
    .outerjoin(Environment, Environment.hash == func.coalesce(Verdict.environment_hash, Attempt.environment_hash))
)


def to_verdict(row: RowMapping) -> contract.Verdict:
    """Return the verdict in a row of :data:`VERDICTS`."""
    known: dict[str, Any] = {str(name): value for name, value in row.items()}
    return contract.Verdict.load({"evaluation_id": known.pop("id"), **known})


def verdict(engine: Engine, evaluation_id: UUID) -> contract.Verdict | None:
    """Return the evaluation's verdict, None while it has none.

    Raises:
        UnknownEvaluation: there is no such evaluation.
    """
    found = verdicts(engine, [evaluation_id])
    if not found and not existing(engine, [evaluation_id]):
        raise UnknownEvaluation(evaluation_id)
    return found.get(evaluation_id)


def verdicts(engine: Engine, ids: Collection[UUID]) -> dict[UUID, contract.Verdict]:
    """Return the verdicts of those of ``ids`` that have one."""
    with transaction(engine) as connection:
        rows = connection.execute(VERDICTS.where(Verdict.evaluation_id == any_uuid(ids))).mappings()
        return {row["id"]: to_verdict(row) for row in rows}


def existing(engine: Engine, ids: Collection[UUID]) -> set[UUID]:
    """Return those of ``ids`` that are evaluations."""
    with transaction(engine) as connection:
        return set(connection.scalars(select(Evaluation.id).where(Evaluation.id == any_uuid(ids))))


def in_batch(engine: Engine, name: str) -> list[UUID]:
    """Return the evaluations of a batch, in the order in which they were submitted."""
    with transaction(engine) as connection:
        return list(
            connection.scalars(
                select(Evaluation.id).where(Evaluation.batch == name).order_by(Evaluation.submitted_at, Evaluation.id)
            )
        )
