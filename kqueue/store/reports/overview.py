"""The fleet at a glance: workers, GPUs, the longest waits, evaluations by minute and day, and the use of devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, make_dataclass
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from sqlalchemy import Date, Engine, Integer, cast, column, func, select, table
from sqlalchemy.dialects.postgresql import distinct_on

from kqueue.categories import Blame, Category
from kqueue.registry import by_feature
from kqueue.store import gpus, workers
from kqueue.store.engine import FLEET, acting, transaction, viewer
from kqueue.store.evaluations import QUEUED, REAL, existing, no_trial
from kqueue.store.gpus import GpuStatus
from kqueue.store.models import Evaluation, Summary, Verdict
from kqueue.store.sql import fetch
from kqueue.store.workers import LiveWorker

_UTILISATION = table("fleet_utilisation", *(column(name) for name in ("device", "host", "busy_share", "alive")))
#: Maximum number of days of a report, and the number of days that are reported without any verdict.
_MOST_DAYS: Final = 366
_FEWEST_DAYS: Final = 14


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


#: The records of features in the state of the fleet, by the name of their field, which is the feature's.
_RECORDS: Final = by_feature("record")
if TYPE_CHECKING:
    Records = object
else:
    Records = make_dataclass("Records", _RECORDS.items(), kw_only=True, frozen=True, slots=True)


@dataclass(frozen=True, slots=True)
class FleetState(Records):
    """The live workers and the GPUs of a fleet, and features' records of the last day."""

    workers: list[LiveWorker]
    gpus: list[GpuStatus]

    @property
    def records(self) -> dict[str, Any]:
        """Features' records by feature."""
        return {name: getattr(self, name) for name in _RECORDS}


def fleet(engine: Engine, *, within_s: float) -> FleetState:
    """Return workers, GPUs and the last day's records, without evaluations that the caller cannot read.

    The workers are those with a heartbeat within the last ``within_s`` seconds.
    """
    with acting(FLEET):
        live, known = workers.live(engine, within_s=within_s), gpus.find(engine)
        records = {name: record.read(engine, live_s=within_s) for name, record in _RECORDS.items()}
    unseen = unreadable(engine, live, known)
    return FleetState([one.hiding(unseen) for one in live], [one.hiding(unseen) for one in known], **records)


def unreadable(engine: Engine, live: Iterable[LiveWorker], known: Iterable[GpuStatus]) -> set[UUID]:
    """Return the running evaluations that the caller cannot read."""
    ids = {worker.busy_with for worker in live if worker.busy_with} | {one for gpu in known for one in gpu.running}
    return ids - existing(engine, ids) if viewer().held else set()


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


@dataclass(frozen=True, slots=True)
class Day:
    """The verdicts of a day in UTC. ``not_judged`` counts failures of the fleet or a problem, and cancellations."""

    day: date
    passed: int
    failed: int
    not_judged: int

    @property
    def total(self) -> int:
        """The number of verdicts."""
        return self.passed + self.failed + self.not_judged

    @property
    def rate(self) -> float | None:
        """The share of right kernels among the judged ones, or None without any."""
        judged = self.passed + self.failed
        return self.passed / judged if judged else None


def days(engine: Engine, *, since: datetime, batch: str = "") -> list[Day]:
    """Return the days since a time, the first one first, and at most a year of them.

    Days before the first verdict are left out, except in the last two weeks. ``batch`` is the beginning of the names of
    the batches that count, or empty for all evaluations.
    """
    day = cast(func.timezone("UTC", Summary.finished_at), Date).label("day")
    query = select(day, Summary.category, func.count()).where(Summary.finished_at >= since)
    query = query.where(Summary.batch.startswith(batch, autoescape=True) if batch else no_trial(Summary.batch))
    blames: dict[date, Counter[Blame]] = {}
    with transaction(engine) as connection:
        for one, category, number in connection.execute(query.group_by(day, Summary.category)):
            blames.setdefault(one, Counter())[Category(category).blame] += number
    today = datetime.now(UTC).date()
    begin = min([*blames, today - timedelta(days=_FEWEST_DAYS - 1)])
    begin = max(begin, since.astimezone(UTC).date(), today - timedelta(days=_MOST_DAYS - 1))
    each = [begin + timedelta(days=ago) for ago in range((today - begin).days + 1)]
    return [_day(one, blames.get(one, Counter())) for one in each]


def _day(one: date, blames: Counter[Blame]) -> Day:
    passed, failed = blames[Blame.NONE], blames[Blame.CANDIDATE]
    return Day(one, passed, failed, blames.total() - passed - failed)
