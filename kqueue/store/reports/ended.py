"""Evaluations that ended since a time, for counters."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Engine, cast, func, literal, select, tuple_
from sqlalchemy.dialects.postgresql import JSONPATH

from kqueue.categories import Category
from kqueue.states import Priority, Writer
from kqueue.store.engine import transaction
from kqueue.store.evaluations import REAL
from kqueue.store.models import Attempt, Evaluation, Verdict
from kqueue.store.sql import any_uuid, columns, fetch

#: JSON path of the categories of earlier attempts in a verdict's evidence, without attempts that were handed back.
_FAILED: Final = "$.attempts[*] ? (!(@.handed_back == true)).category"


@dataclass(frozen=True, slots=True)
class Ended:
    """An evaluation with a verdict, without its large columns.

    Attributes:
        owner: the owner of the evaluation.
        category: the category of its verdict.
        written_by: the process that recorded the verdict.
        reused: True if the verdict was reused from an equal evaluation.
        submitted_at, finished_at: UTC.
        begun_at: the start of its first attempt, or None.
        durations_s: seconds of each step of the attempt that gave the verdict.
        built: the process that compiled its extensions (:class:`kqueue.evidence.Build`), or None.
        earlier: the categories of the attempts before the last one, without those handed back.
    """

    evaluation_id: UUID
    owner: str
    lane: str
    priority: Priority
    category: Category
    written_by: Writer
    reused: bool
    submitted_at: datetime
    finished_at: datetime
    begun_at: datetime | None
    durations_s: dict[str, float]
    built: str | None
    earlier: list[Category]


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
            *columns(
                Ended,
                Verdict,
                Evaluation,
                reused=Verdict.reused_from.is_not(None),
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
