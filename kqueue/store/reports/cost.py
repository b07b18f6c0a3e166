"""The cost of evaluations: slot seconds, exclusive device seconds, CPU seconds and waiting, by different keys."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import ColumnElement, Double, Engine, case, cast, func, select, true
from sqlalchemy.orm import aliased
from sqlalchemy.sql.selectable import LateralFromClause

from kqueue.categories import Blame
from kqueue.store.evaluations import REAL
from kqueue.store.models import Attempt, Evaluation, Verdict
from kqueue.store.sql import fetch


class By(StrEnum):
    """The key by which costs are summed."""

    PRODUCER = "producer"
    """The producer: a token of HTTP, or a declared name."""
    OWNER = "owner"
    BATCH = "batch"
    PROBLEM = "problem"
    """The problem's label, or its hash where it has none."""
    LANE = "lane"
    DAY = "day"
    """The day of the verdict, UTC."""


_KEYS: Final[dict[By, ColumnElement[Any]]] = {
    By.OWNER: func.coalesce(Evaluation.owner, ""),
    By.PRODUCER: func.coalesce(Evaluation.producer, ""),
    By.BATCH: func.coalesce(Evaluation.batch, ""),
    By.PROBLEM: func.coalesce(Evaluation.problem_label, func.left(Evaluation.problem_hash, 12)),
    By.LANE: func.coalesce(Evaluation.lane, ""),
    By.DAY: func.to_char(func.timezone("UTC", Verdict.finished_at), "YYYY-MM-DD"),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of the evaluations of one producer, batch, problem, lane or day.

    Attributes:
        key: the key's value. Empty for evaluations without one.
        evaluations: the number of evaluations with verdicts.
        passed: the number of evaluations that passed.
        fleet_failed: the number of evaluations that failed by the fleet's own fault.
        reused: the number of evaluations without cost, because they reused a verdict.
        attempts: the number of all their attempts.
        slot_s: seconds for which these attempts occupied a slot.
        alone_s: seconds for which the last attempts had exclusive use of a device for timing.
        cpu_s: CPU seconds of judges and sealed processes in the last attempts.
        waited_s: seconds from submission to the first attempt, or to the verdict if there was none.
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


def _seconds(interval: ColumnElement[Any]) -> ColumnElement[float]:
    return cast(func.greatest(0, func.extract("epoch", interval)), Double)


_TRY: Final = aliased(Attempt)
#: The number of attempts of an evaluation, the seconds for which they occupied a slot, and the first one's start.
TRIED: Final = (
    select(
        func.count().label("number"),
        func.coalesce(func.sum(_seconds(func.coalesce(_TRY.ended_at, _TRY.lease_until) - _TRY.started_at)), 0.0).label(
            "seconds"
        ),
        func.min(_TRY.started_at).label("begun_at"),
    )
    .where(_TRY.evaluation_id == Evaluation.id)
    .lateral("tried")
)
#: Seconds from submission to the first attempt, or to the verdict if there was none.
WAITED_S: Final = _seconds(func.coalesce(TRIED.c.begun_at, Verdict.finished_at) - Evaluation.submitted_at)


def cost(engine: Engine, *, by: By, since: datetime | None, batch: str | None = None, limit: int = 100) -> list[Cost]:
    """Return the cost of evaluations with verdicts since a time, the highest first, summed by a key."""
    wanted: list[ColumnElement[bool]] = [REAL]
    if since is not None:
        wanted.append(Verdict.finished_at >= since)
    if batch is not None:
        wanted.append(Evaluation.batch == batch)
    alone = _sum_of("durations_s", "alone", beginning="alone_")
    worked = _sum_of("cpu_s", "worked")
    key = _KEYS[by]
    query = (
        select(
            key.label("key"),
            func.count().label("evaluations"),
            _count(Verdict.blame == Blame.NONE).label("passed"),
            _count(Verdict.blame == Blame.FLEET).label("fleet_failed"),
            _count(Verdict.reused_from.is_not(None)).label("reused"),
            func.sum(TRIED.c.number).label("attempts"),
            func.sum(TRIED.c.seconds).label("slot_s"),
            func.sum(alone.c.seconds).label("alone_s"),
            func.sum(worked.c.seconds).label("cpu_s"),
            func.sum(WAITED_S).label("waited_s"),
        )
        .select_from(Verdict)
        .join(Evaluation, Evaluation.id == Verdict.evaluation_id)
        .join(TRIED, true())
        .join(alone, true())
        .join(worked, true())
        .where(*wanted)
        .group_by(key)
        .order_by(func.sum(TRIED.c.seconds).desc(), key)
        .limit(limit)
    )
    return fetch(engine, Cost, query)


def _sum_of(field: str, name: str, *, beginning: str = "") -> LateralFromClause:
    """Return the sum of the seconds in a field of a verdict's evidence with this prefix, or 0 for a reused verdict."""
    part = func.jsonb_each_text(Verdict.evidence[field]).table_valued("key", "value", name=f"{name}_part")
    return (
        select(func.coalesce(func.sum(cast(part.c.value, Double)), 0.0).label("seconds"))
        .where(part.c.key.startswith(beginning), Verdict.reused_from.is_(None))
        .lateral(name)
    )


def _count(condition: ColumnElement[bool]) -> ColumnElement[int]:
    return func.count(case((condition, 1)))
