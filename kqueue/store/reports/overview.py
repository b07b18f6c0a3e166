"""The fleet at a glance: the longest waits, recently ended evaluations, and the use of devices."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy import Engine, Integer, cast, column, func, select, table
from sqlalchemy.dialects.postgresql import distinct_on

from kqueue.store.engine import transaction
from kqueue.store.evaluations import QUEUED, REAL
from kqueue.store.models import Evaluation, Verdict
from kqueue.store.sql import fetch

_UTILISATION = table("fleet_utilisation", *(column(name) for name in ("device", "host", "busy_share", "alive")))


@dataclass(frozen=True, slots=True)
class Oldest:
    """The queued evaluation of a lane that was submitted first."""

    lane: str
    evaluation_id: UUID
    submitted_at: datetime


@dataclass(frozen=True, slots=True)
class Use:
    """The use of a device's slots in the last hour.

    Attributes:
        host, device: the device: a GPU's UUID, or ``cpu`` of a host.
        share: the share of time in which its slots had an evaluation, 0 to 1.
    """

    host: str
    device: str
    share: float


def oldest(engine: Engine) -> list[Oldest]:
    """Return the queued evaluation of each lane that was submitted first, by lane."""
    query = (
        select(Evaluation.lane, Evaluation.id.label("evaluation_id"), Evaluation.submitted_at)
        .where(QUEUED, REAL)
        .ext(distinct_on(Evaluation.lane))
        .order_by(Evaluation.lane, Evaluation.submitted_at, Evaluation.id)
    )
    return fetch(engine, Oldest, query)


def use(engine: Engine) -> list[Use]:
    """Return the use of each device's slots in the last hour, for devices with live workers."""
    columns = _UTILISATION.c
    query = (
        select(columns.host, columns.device, func.avg(columns.busy_share).label("share"))
        .where(columns.alive)
        .group_by(columns.host, columns.device)
        .order_by(columns.host, columns.device)
    )
    return fetch(engine, Use, query)


def ended_by_minute(engine: Engine, *, minutes: int) -> list[int]:
    """Return the number of verdicts in each of the last minutes, the oldest first."""
    ago = cast(func.floor(func.extract("epoch", func.now() - Verdict.finished_at) / 60), Integer)
    query = (
        select(ago.label("ago"), func.count().label("number"))
        .join(Evaluation, Evaluation.id == Verdict.evaluation_id)
        .where(REAL, Verdict.finished_at > func.now() - func.make_interval(0, 0, 0, 0, 0, minutes))
        .group_by(ago)
    )
    counted = [0] * minutes
    with transaction(engine) as connection:
        for row in connection.execute(query):
            if 0 <= row.ago < minutes:
                counted[minutes - 1 - row.ago] = row.number
    return counted
