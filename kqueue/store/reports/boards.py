"""A problem's page: its leaderboard, the times of its reference, and the records and profiles of its kernels."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any, Final
from uuid import UUID

from sqlalchemy import (
    ColumnElement,
    Double,
    Engine,
    Select,
    and_,
    cast,
    func,
    literal,
    literal_column,
    or_,
    select,
    true,
    tuple_,
)
from sqlalchemy.orm import aliased
from sqlalchemy.sql.selectable import LateralFromClause, Subquery

from kqueue.categories import Category
from kqueue.contract import Backend
from kqueue.errors import UnknownEvaluation
from kqueue.evidence import Profile
from kqueue.store.engine import transaction
from kqueue.store.evaluations import REAL, REAL_PROBLEM
from kqueue.store.models import (
    PROFILED,
    Attempt,
    Baseline,
    Environment,
    Evaluation,
    Kernel,
    Problem,
    Summary,
    Token,
    Verdict,
)
from kqueue.store.reports.listing import LISTED, Listed
from kqueue.store.sql import columns, fetch

#: Number of the last profiles of a problem from which the displayed ones are chosen.
_PROFILES: Final = 100
#: Number of the last evaluations of a problem in which its kernels are counted.
COUNTED: Final = 1000


@dataclass(frozen=True, slots=True)
class UsedProblem:
    """A stored problem and its use.

    Attributes:
        problem_hash: SHA-256 of its source.
        problem_label: the label from its last evaluation, or None.
        created_at: its first submission, UTC.
        used_at: its last submission, UTC. None if no evaluation is left.
        evaluations: the number of its last evaluations, at most :data:`COUNTED`.
        kernels: the number of kernels in these evaluations.
    """

    problem_hash: str
    problem_label: str | None
    created_at: datetime
    used_at: datetime | None
    evaluations: int
    kernels: int


@dataclass(frozen=True, slots=True)
class Placed:
    """A kernel on a leaderboard: its best measurement in a precision on a device model. Times are in milliseconds.

    Attributes:
        precision, device: the precision and the device model.
        runtime_ms, q1_ms, q3_ms: median and quartiles.
        baseline_ms: the median of the eager reference. None if not measured.
        compiled_ms: the median of the compiled reference. None if not requested or failed.
        speedup: speedup over the eager reference, or None.
        measured: the number of its valid measurements.
        evaluation_id, finished_at: the evaluation of the best one and its end, UTC.
        producer: its producer: a token's name, or a declared name.
    """

    kernel_hash: str
    kernel_label: str | None
    backend: Backend
    precision: str
    device: str | None
    runtime_ms: float
    q1_ms: float | None
    q3_ms: float | None
    baseline_ms: float | None
    compiled_ms: float | None
    speedup: float | None
    measured: int
    evaluation_id: UUID
    finished_at: datetime
    producer: str

    @property
    def speedups(self) -> tuple[float | None, float | None]:
        """The eager reference's median divided by the upper and the lower quartile. None if unknown."""
        low, high = (self.baseline_ms / ms if self.baseline_ms and ms else None for ms in (self.q3_ms, self.q1_ms))
        return low, high


@dataclass(frozen=True, slots=True)
class KnownBaseline:
    """A cached time of a reference. Times are in milliseconds.

    Attributes:
        environment_hash, device, driver, torch, host: the environment of the measurement.
        settings_key: the settings on which the time depends.
        median_ms, q1_ms, q3_ms: median and quartiles of the calls.
        created_at: the first measurement, UTC.
    """

    environment_hash: str
    device: str
    driver: str | None
    torch: str
    host: str
    settings_key: str
    median_ms: float
    q1_ms: float
    q3_ms: float
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Profiled:
    """The profile of a kernel by Nsight Compute.

    Attributes:
        name: the kernel's label, or a prefix of its hash, made unique within the list.
    """

    evaluation_id: UUID
    name: str
    profile: Profile


class _Measured:
    """Valid measurements with their precision and device, under a distinct alias in a statement."""

    def __init__(self, name: str) -> None:
        self.summary = aliased(Summary, name=name)
        self._evaluation, self._verdict = aliased(Evaluation), aliased(Verdict)
        self._attempt, self._environment = aliased(Attempt), aliased(Environment)
        self.precision: ColumnElement[Any] = self._evaluation.settings["precision"].astext
        self.device = self._environment.device
        #: Sort key whose minimum is the best measurement: the fastest, and the earliest of equal ones.
        self.order = tuple_(self.summary.runtime_ms, self.summary.finished_at, self.summary.evaluation_id)

    def select(self, *columns: Any) -> Select[*tuple[Any, ...]]:
        """Return the query for columns of all valid measurements."""
        return (
            select(*columns)
            .select_from(self.summary)
            .join(self._evaluation, self._evaluation.id == self.summary.evaluation_id)
            .join(self._verdict, self._verdict.evaluation_id == self.summary.evaluation_id)
            .join(self._attempt, self._attempt.id == self._verdict.attempt_id)
            .outerjoin(self._environment, self._environment.hash == self._attempt.environment_hash)
            .where(
                # The same literals as in the partial indexes, which Postgres would not use with parameters.
                self.summary.category == literal_column(f"'{Category.PASSED}'"),
                ~self.summary.reused,
                self.summary.runtime_ms.is_not(None),
            )
        )

    def is_alike(self, other: _Measured) -> ColumnElement[bool]:
        """Return the condition that two have the same kernel, problem, precision and device model."""
        return and_(
            self.summary.kernel_hash == other.summary.kernel_hash,
            self.summary.problem_hash == other.summary.problem_hash,
            self.precision.is_not_distinct_from(other.precision),
            self.device.is_not_distinct_from(other.device),
        )


@cache
def _measured(name: str) -> _Measured:
    """Return a cached instance, because creating one takes as long as executing its query."""
    return _Measured(name)


def used_problems(
    engine: Engine, *, named: str | None = None, after: tuple[datetime, str] | None = None, limit: int = 25
) -> list[UsedProblem]:
    """Return stored problems, the latest first.

    Args:
        named: a part of a label from their evaluations, or a prefix of their hash.
        after: ``created_at`` and hash of the caller's last result, after which the list continues.
    """
    last = (
        select(Evaluation.problem_label, Evaluation.kernel_hash, Evaluation.submitted_at)
        .where(Evaluation.problem_hash == Problem.hash)
        .order_by(Evaluation.submitted_at.desc())
    )
    wanted: list[ColumnElement[bool]] = [REAL_PROBLEM]
    if named is not None:
        label = last.limit(1).correlate(Problem).subquery()
        fits = select(label.c.problem_label).where(label.c.problem_label.icontains(named, autoescape=True)).exists()
        wanted.append(or_(Problem.hash.startswith(named, autoescape=True), fits))
    if after is not None:
        wanted.append(tuple_(Problem.created_at, Problem.hash) < tuple_(*map(literal, after)))
    order = (Problem.created_at.desc(), Problem.hash.desc())
    page = select(Problem.hash, Problem.created_at).where(*wanted).order_by(*order).limit(limit).subquery()
    last_ones = (
        select(Evaluation.kernel_hash)
        .where(Evaluation.problem_hash == page.c.hash)
        .order_by(Evaluation.submitted_at.desc())
        .limit(COUNTED)
        .correlate(page)
        .subquery()
    )
    counted = select(
        func.count().label("evaluations"), func.count(func.distinct(last_ones.c.kernel_hash)).label("kernels")
    ).lateral()
    newest = (
        select(Evaluation.problem_label, Evaluation.submitted_at.label("used_at"))
        .where(Evaluation.problem_hash == page.c.hash)
        .order_by(Evaluation.submitted_at.desc())
        .limit(1)
        .lateral()
    )
    query = (
        select(*columns(UsedProblem, page, newest, counted, problem_hash=page.c.hash))
        .select_from(page)
        .join(counted, true())
        .outerjoin(newest, true())
        .order_by(page.c.created_at.desc(), page.c.hash.desc())
    )
    return fetch(engine, UsedProblem, query)


def leaderboard(
    engine: Engine,
    problem_hash: str,
    *,
    precision: str | None = None,
    device: str | None = None,
    backend: Backend | None = None,
    limit: int = 50,
) -> list[Placed]:
    """Return a problem's kernels that passed and were timed, the largest speedup first.

    A kernel has one line for each precision and device model with its fastest measurement, as in the view
    ``best_verdicts``. Reused verdicts do not count as measurements.

    Args:
        precision, backend, device: the only precision, backend and device model to list.
    """
    first, every = _fastest(problem_hash, precision, device, backend, limit), _measured("every")
    measured = (
        every.select(func.count())
        .where(
            every.summary.problem_hash == first.c.problem_hash,
            every.summary.kernel_hash == first.c.kernel_hash,
            every.precision.is_not_distinct_from(first.c.precision),
            every.device.is_not_distinct_from(first.c.device),
        )
        .scalar_subquery()
    )
    runtime: Any = Verdict.runtime
    evidence: Any = Verdict.evidence
    shown = columns(
        Placed,
        first,
        Evaluation,
        Verdict,
        Kernel,
        q1_ms=cast(runtime["q1_ms"].astext, Double),
        q3_ms=cast(runtime["q3_ms"].astext, Double),
        compiled_ms=cast(evidence["compiled_baseline"]["median_ms"].astext, Double),
        measured=measured,
        producer=func.coalesce(Token.name, Evaluation.producer),
    )
    query = (
        select(*shown)
        .select_from(first)
        .join(Evaluation, Evaluation.id == first.c.evaluation_id)
        .join(Verdict, Verdict.evaluation_id == first.c.evaluation_id)
        .join(Kernel, Kernel.hash == first.c.kernel_hash)
        .outerjoin(Token, Token.id == Evaluation.token_id)
        .order_by(first.c.speedup.desc().nulls_last(), first.c.runtime_ms, first.c.evaluation_id)
    )
    return fetch(engine, Placed, query)


def _fastest(
    problem_hash: str, precision: str | None, device: str | None, backend: Backend | None, limit: int
) -> Subquery:
    """Return the query for the fastest measurement of each kernel, precision and device model of a problem."""
    mine, other = _measured("mine"), _measured("other")
    wanted: list[ColumnElement[bool]] = [mine.summary.problem_hash == problem_hash]
    if precision is not None:
        wanted.append(mine.precision == precision)
    if device is not None:
        wanted.append(mine.device == device)
    if backend is not None:
        wanted.append(
            select(Kernel.hash).where(Kernel.hash == mine.summary.kernel_hash, Kernel.backend == backend).exists()
        )
    # Rows are read in the order of speedups, by an index, until enough are found that no other row of the kernel beats.
    return (
        mine.select(
            mine.summary.evaluation_id,
            mine.summary.problem_hash,
            mine.summary.kernel_hash,
            mine.precision.label("precision"),
            mine.device.label("device"),
            mine.summary.speedup,
            mine.summary.runtime_ms,
        )
        .where(*wanted, ~other.select(literal(1)).where(other.is_alike(mine), other.order < mine.order).exists())
        .order_by(mine.summary.speedup.desc().nulls_last(), mine.summary.runtime_ms, mine.summary.evaluation_id)
        .limit(limit)
        .subquery()
    )


def records(engine: Engine, problem_hash: str, *, limit: int = 50) -> list[Listed]:
    """Return the evaluations that were faster than all before them, the latest first: the steps of the curve."""
    # The search goes backwards: each record is the fastest of all evaluations that ended before the next record. The
    # index orders them by speedup, so none is read twice. Of equal evaluations the first is the record.
    timed = [
        Summary.problem_hash == problem_hash,
        Summary.category == Category.PASSED,
        Summary.speedup > 0,
        Summary.reused.is_(False),
    ]
    fastest = (
        select(Summary.speedup)
        .where(*timed)
        .order_by(Summary.speedup.desc().nulls_last(), Summary.runtime_ms, Summary.evaluation_id)
        .limit(1)
    )

    def first(speedup: ColumnElement[Any]) -> LateralFromClause:
        return (
            select(Summary.evaluation_id, Summary.finished_at, Summary.speedup)
            .where(*timed, Summary.speedup == speedup)
            .order_by(Summary.finished_at, Summary.evaluation_id)
            .limit(1)
            .lateral()
        )

    last = fastest.subquery()
    last_of = first(last.c.speedup)
    best = select(last_of).select_from(last).join(last_of, true()).cte("best", recursive=True)
    former = fastest.where(
        Summary.speedup < best.c.speedup,
        tuple_(Summary.finished_at, Summary.evaluation_id) < tuple_(best.c.finished_at, best.c.evaluation_id),
    ).lateral()
    first_of = first(former.c.speedup)
    best = best.union_all(select(first_of).select_from(best).join(former, true()).join(first_of, true()))
    # The rows are produced in this order, and Postgres stops at the limit.
    latest = select(best).limit(limit).subquery()
    query = LISTED.join(latest, latest.c.evaluation_id == Evaluation.id).order_by(latest.c.speedup.desc())
    return fetch(engine, Listed, query)


def baselines_of(engine: Engine, problem_hash: str, *, limit: int = 50) -> list[KnownBaseline]:
    """Return the cached times of a problem's reference, the latest first."""
    time: Any = Baseline.measurement
    times = {name: cast(time[name].astext, Double) for name in ("median_ms", "q1_ms", "q3_ms")}
    query = (
        select(*columns(KnownBaseline, Baseline, Environment, **times))
        .join(Environment, Environment.hash == Baseline.environment_hash)
        .where(Baseline.problem_hash == problem_hash)
        .order_by(Baseline.created_at.desc(), Baseline.environment_hash, Baseline.settings_key)
        .limit(limit)
    )
    return fetch(engine, KnownBaseline, query)


def profiled(engine: Engine, problem_hash: str, *, limit: int = 7) -> list[Profiled]:
    """Return the last profile of each kernel of a problem, the latest first, on the device of the latest one."""
    profile: Any = Verdict.evidence["profile"]
    # The evidence is large, so the evaluations are chosen before it is read.
    latest = (
        select(Verdict.evaluation_id)
        .join(Evaluation, Evaluation.id == Verdict.evaluation_id)
        .where(Evaluation.problem_hash == problem_hash, PROFILED, REAL)
        .order_by(Verdict.finished_at.desc(), Evaluation.id)
        .limit(_PROFILES)
        .subquery()
    )
    query = (
        select(Evaluation.id, Evaluation.kernel_hash, Evaluation.kernel_label, profile, Environment.device)
        .join(latest, latest.c.evaluation_id == Evaluation.id)
        .join(Verdict, Verdict.evaluation_id == Evaluation.id)
        .join(Attempt, Attempt.id == Verdict.attempt_id)
        .join(Environment, Environment.hash == Attempt.environment_hash)
        .where(profile["by"].astext == "ncu")
        .order_by(Verdict.finished_at.desc(), Evaluation.id)
    )
    with transaction(engine) as connection:
        rows = connection.execute(query).all()
    by_kernel: dict[str, Profiled] = {}
    names: set[str] = set()
    for identity, kernel_hash, label, counted, device in rows:
        if kernel_hash in by_kernel or device != rows[0].device or len(by_kernel) == limit:
            continue
        name = label or kernel_hash[:12]
        name = f"{name} {kernel_hash[:8]}" if name in names else name
        names.add(name)
        by_kernel[kernel_hash] = Profiled(identity, name, Profile.model_validate(counted))
    return list(by_kernel.values())


def evaluation_of(engine: Engine, kernel_hash: str) -> UUID:
    """Return the evaluation to show for a kernel: its fastest valid measurement, or else its last evaluation.

    Raises:
        UnknownEvaluation: no evaluation has this kernel.
    """
    is_measured = and_(Verdict.category == Category.PASSED, Verdict.reused_from.is_(None))
    query = (
        select(Evaluation.id)
        .outerjoin(Verdict, and_(Verdict.evaluation_id == Evaluation.id, is_measured))
        .where(Evaluation.kernel_hash == kernel_hash, REAL)
        .order_by(Verdict.runtime_ms.nulls_last(), Evaluation.submitted_at.desc(), Evaluation.id)
        .limit(1)
    )
    with transaction(engine) as connection:
        evaluation_id = connection.scalars(query).one_or_none()
    if evaluation_id is None:
        raise UnknownEvaluation(kernel_hash, what="the kernel")
    return evaluation_id
