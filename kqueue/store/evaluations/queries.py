"""Queries for verdicts and ids."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final
from uuid import UUID

from sqlalchemy import Engine, RowMapping, func, select

from kqueue import contract
from kqueue.errors import UnknownEvaluation
from kqueue.store.engine import transaction
from kqueue.store.evaluations.conditions import ITS_KERNEL
from kqueue.store.models import Attempt, Environment, Evaluation, Kernel, Verdict
from kqueue.store.sql import any_uuid, columns

#: Query with one row for each verdict, which :func:`to_verdict` reads.
VERDICTS: Final = (
    select(*columns(contract.Verdict, Evaluation, Kernel, Verdict, environment=Environment.facts))
    .join(Evaluation, Evaluation.id == Verdict.evaluation_id)
    .join(Kernel, ITS_KERNEL)
    .outerjoin(Attempt, Attempt.id == Verdict.attempt_id)
    .outerjoin(Environment, Environment.hash == func.coalesce(Verdict.environment_hash, Attempt.environment_hash))
)


def to_verdict(row: RowMapping) -> contract.Verdict:
    """Return the verdict in a row of :data:`VERDICTS`."""
    return contract.Verdict.load({str(name): value for name, value in row.items()})


def verdict(engine: Engine, evaluation_id: UUID) -> contract.Verdict | None:
    """Return the evaluation's verdict, or None while it has none."""
    by_id = verdicts(engine, [evaluation_id])
    if not by_id and not existing(engine, [evaluation_id]):
        raise UnknownEvaluation(evaluation_id)
    return by_id.get(evaluation_id)


def verdicts(engine: Engine, ids: Collection[UUID]) -> dict[UUID, contract.Verdict]:
    """Return the existing verdicts of evaluations, by id."""
    with transaction(engine) as connection:
        rows = connection.execute(VERDICTS.where(Verdict.evaluation_id == any_uuid(ids))).mappings()
        return {row["evaluation_id"]: to_verdict(row) for row in rows}


def existing(engine: Engine, ids: Collection[UUID]) -> set[UUID]:
    """Return the ids that belong to evaluations."""
    with transaction(engine) as connection:
        return set(connection.scalars(select(Evaluation.id).where(Evaluation.id == any_uuid(ids))))


def in_batch(engine: Engine, name: str) -> list[UUID]:
    """Return the evaluations of a batch in the order of their submission."""
    with transaction(engine) as connection:
        return list(
            connection.scalars(
                select(Evaluation.id).where(Evaluation.batch == name).order_by(Evaluation.submitted_at, Evaluation.id)
            )
        )
