"""What evaluations cost: time of slots, of devices held alone, of CPUs, and waiting, by whom or what they were for."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import ColumnElement, Double, Engine, case, cast, func, select, true
from sqlalchemy.sql.selectable import LateralFromClause

from kqueue.categories import Blame
from kqueue.store.engine import transaction
from kqueue.store.evaluations import REAL
from kqueue.store.models import Attempt, Evaluation, Verdict
from kqueue.store.sql import read


class By(StrEnum):
    """What costs are added up by."""

    PRODUCER = "producer"
    """Who submitted: a token of HTTP, or the name that was declared."""
    BATCH = "batch"
    PROBLEM = "problem"
    """The problem's label, or its hash where it has none."""
    LANE = "lane"
    DAY = "day"
    """The day of the verdict, UTC."""


_KEYS: Final[dict[By, ColumnElement[Any]]] = {
    By.PRODUCER: func.coalesce(Evaluation.producer, ""),
    By.BATCH: func.coalesce(Evaluation.batch, ""),
    By.PROBLEM: func.coalesce(Evaluation.problem_label, func.left(Evaluation.problem_hash, 12)),
    By.LANE: func.coalesce(Evaluation.lane, ""),
    By.DAY: func.to_char(func.timezone("UTC", Verdict.finished_at), "YYYY-MM-DD"),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """What the evaluations of one producer, batch, problem, lane or day cost.

    Attributes:
        key: which one; empty for evaluations that have none.
        evaluations: those that got their verdicts.
        passed: those of them that passed.
        fleet_failed: those that failed by the fleet's own fault.
        reused: those that cost nothing, as they had the verdict of an equal one.
        attempts: attempts of all of them.
        slot_s: seconds for which these attempts had a slot.
        alone_s: seconds for which the last of them held a device alone, to time on it.
        cpu_s: seconds of CPUs that judges and sealed processes used in the last of them.
        waited_s: seconds from submission to the first attempt, or to the verdict where there was none.
    """

    key: str
    evaluations: int
    passed: int
    fleet_failed: int
    reused: int
    attempts: int
    slot_s: float
    alone_s: float
    cpu_s: float
    waited_s: float


def cost(engine: Engine, *, by: By, since: datetime | None, batch: str | None = None, limit: int = 100) -> list[Cost]:
    """Return what evaluations cost that got their verdicts since a moment, the dearest first.

    Args:
        engine: the database.
        by: what is added up.
        since: the moment; None for all that are kept.
        batch: only of this batch.
        limit: how many rows at most.
    """
    wanted: list[ColumnElement[bool]] = [REAL]
    if since is not None:
        wanted.append(Verdict.finished_at >= since)
    if batch is not None:
        wanted.append(Evaluation.batch == batch)
    until = func.coalesce(Attempt.ended_at, Attempt.lease_until)
    tried = (
        select(
            func.count().label("number"),
            func.coalesce(func.sum(_seconds(until - Attempt.started_at)), 0.0).label("seconds"),
            func.min(Attempt.started_at).label("begun_at"),
        )
        .where(Attempt.evaluation_id == Evaluation.id)
        .lateral("tried")
    )
    alone = _told("durations_s", "alone", beginning="alone_")
    worked = _told("cpu_s", "worked")
    waited = func.coalesce(tried.c.begun_at, Verdict.finished_at) - Evaluation.submitted_at
    key = _KEYS[by]
    query = (
        select(
            key.label("key"),
            func.count().label("evaluations"),
            _count(Verdict.blame == Blame.NONE).label("passed"),
            _count(Verdict.blame == Blame.FLEET).label("fleet_failed"),
            _count(Verdict.reused_from.is_not(None)).label("reused"),
            func.sum(tried.c.number).label("attempts"),
            func.sum(tried.c.seconds).label("slot_s"),
            func.sum(alone.c.seconds).label("alone_s"),
            func.sum(worked.c.seconds).label("cpu_s"),
            func.sum(_seconds(waited)).label("waited_s"),
        )
        .select_from(Verdict)
        .join(Evaluation, Evaluation.id == Verdict.evaluation_id)
        .join(tried, true())
        .join(alone, true())
        .join(worked, true())
        .where(*wanted)
        .group_by(key)
        .order_by(func.sum(tried.c.seconds).desc(), key)
        .limit(limit)
    )
    with transaction(engine) as connection:
        return read(Cost, connection.execute(query))


def _told(field: str, name: str, *, beginning: str = "") -> LateralFromClause:
    """Return the sum of the seconds that a verdict of its own has in a field of its evidence, of some names there."""
    part = func.jsonb_each_text(Verdict.evidence[field]).table_valued("key", "value", name=f"{name}_part")
    return (
        select(func.coalesce(func.sum(cast(part.c.value, Double)), 0.0).label("seconds"))
        .where(part.c.key.startswith(beginning), Verdict.reused_from.is_(None))
        .lateral(name)
    )


def _seconds(interval: ColumnElement[Any]) -> ColumnElement[float]:
    return cast(func.greatest(0, func.extract("epoch", interval)), Double)


def _count(condition: ColumnElement[bool]) -> ColumnElement[int]:
    return func.count(case((condition, 1)))
