"""A problem's page: its leaderboard, the times of its reference, and the records and profiles of its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Final, Unpack
from uuid import UUID

from sqlalchemy import ColumnElement, Double, Engine, Select, case, cast, func, literal, or_, select, true, tuple_
from sqlalchemy.dialects.postgresql import JSONB, distinct_on
from sqlalchemy.sql.selectable import Subquery

from kqueue.contract import RULES, Precision, Settings
from kqueue.errors import UnknownEvaluation
from kqueue.evidence import Profile
from kqueue.filters import Filters
from kqueue.states import Purpose, Trials
from kqueue.store.engine import transaction
from kqueue.store.evaluations import ITS_KERNEL, ITS_PROBLEM, REAL, REAL_PROBLEM, no_trial
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
from kqueue.store.reports.curves import MEASURED, medians_of
from kqueue.store.reports.listing import conditions
from kqueue.store.reports.row import Row, select_of, view
from kqueue.store.sql import any_text, columns, fetch

#: The columns that identify measurements of the same kernel for the same problem.
_SAME: Final = (Summary.problem_hash, Summary.kernel_hash)
_PRECISION: Final[ColumnElement[Any]] = Evaluation.settings["precision"].astext
#: The rules of usual settings, and what these settings contain.
_USUAL: Final = literal({}, JSONB)
_USUAL_ONES: Final = {"timing": {"cold_l2": True}, **Settings().model_dump(mode="json", include={*RULES, "policies"})}
#: Condition on times that are precise enough for a rank.
_RANKED: Final = Verdict.runtime["purpose"].astext.is_distinct_from(Purpose.TRAIN)
#: Number of the last profiles of a problem from which the displayed ones are chosen.
_PROFILES: Final = 100
#: Number of the last evaluations of a problem in which its kernels are counted.
COUNTED: Final = 1000


@dataclass(frozen=True, slots=True)
class UsedProblem:
    """A stored problem and its use.

    Attributes:
        problem_hash: SHA-256 of its source.
        owner: its owner.
        problem_label: the label from its last evaluation, or None.
        created_at: its first submission, UTC.
        used_at: its last submission, UTC. None if no evaluation is left.
        evaluations: the number of its last evaluations, at most :data:`COUNTED`.
        kernels: the number of kernels in these evaluations.
    """

    problem_hash: str
    owner: str
    problem_label: str | None
    created_at: datetime
    used_at: datetime | None
    evaluations: int
    kernels: int


@view(
    "problem_hash problem_label kernel_hash kernel_label backend precision device runtime_ms q1_ms q3_ms baseline_ms"
    " compiled_ms speedup speedup_low speedup_high slowest fastest measured settings evaluation_id finished_at owner"
    " producer"
)
class Placed(Row):
    """A kernel in a ranking: its median measurement under equal settings on a device model. Times are in milliseconds.

    Of an even number of measurements it is the slower of the two in the middle.

    Attributes:
        precision, device: the precision and the device model.
        slowest, fastest: smallest and largest speedup of all its valid measurements, or None.
        measured: the number of its valid measurements.
        settings: the settings on which a verdict's meaning depends that are not the usual ones.
        evaluation_id, finished_at: the evaluation of the median one and its end, UTC.
    """

    precision: str
    runtime_ms: float
    slowest: float | None
    fastest: float | None
    measured: int
    settings: dict[str, Any]
    finished_at: datetime


@view("evaluation_id at kernel_hash kernel_label speedup")
class Record(Row):
    """A kernel that was faster than all kernels of its problem before it.

    Attributes:
        evaluation_id, at: its first valid measurement and the end of it, UTC.
        speedup: the median speedup of all its valid measurements, on all devices.
    """

    at: datetime
    speedup: float


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


def used_problems(
    engine: Engine, *, named: str | None = None, after: tuple[datetime, str] | None = None, limit: int = 25
) -> list[UsedProblem]:
    """Return stored problems, the latest first. ``named`` is a part of a label, or a prefix of their hash."""
    last = (
        select(Evaluation.problem_label, Evaluation.kernel_hash, Evaluation.submitted_at)
        .where(ITS_PROBLEM)
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
    page = (
        select(Problem.hash, Problem.owner, Problem.created_at).where(*wanted).order_by(*order).limit(limit).subquery()
    )
    last_ones = (
        select(Evaluation.kernel_hash)
        .where(Evaluation.problem_hash == page.c.hash, Evaluation.owner == page.c.owner)
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
        .where(Evaluation.problem_hash == page.c.hash, Evaluation.owner == page.c.owner)
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
    backend: str | None = None,
    limit: int = 50,
) -> list[Placed]:
    """Return a problem's kernels that passed and were timed, as in :func:`ranking`."""
    wanted = [Summary.problem_hash == problem_hash, no_trial(Summary.batch), _RANKED]
    if precision is not None:
        wanted.append(literal(precision) == _PRECISION)
    if device is not None:
        wanted.append(Environment.device == device)
    if backend is not None:
        wanted.append(select(Kernel.hash).where(Kernel.hash == Summary.kernel_hash, Kernel.backend == backend).exists())
    return _ranking(engine, wanted, limit)


def best(
    engine: Engine,
    *,
    problem: str | None = None,
    precision: Precision | None = None,
    device: Annotated[str | None, "A device model's name, or a part of it."] = None,
    limit: int = 100,
) -> list[Placed]:
    """Return the fastest passed kernel of each problem, precision and device model, by usual settings."""
    wanted = [no_trial(Summary.batch), _RANKED]
    if problem is not None:
        # The best evaluation can have named the problem by its hash only.
        same = select(Evaluation.problem_hash).where(*conditions({"problem": problem, "trials": Trials.WITH}))
        with transaction(engine) as connection:
            # Within the ranking's query, Postgres would choose nested loops.
            wanted.append(Summary.problem_hash == any_text(connection.scalars(same.distinct()).all()))
    if precision is not None:
        wanted.append(literal(precision) == _PRECISION)
    if device is not None:
        wanted.append(Environment.device.icontains(device, autoescape=True))
    return _ranking(engine, wanted, limit, only_best=True)


def best_of_batch(engine: Engine, batch: str, *, limit: int = 20) -> list[Placed]:
    """Return the kernels of a batch, as in :func:`ranking`, by its own measurements."""
    return _ranking(engine, [Summary.batch == batch], limit)


def ranking(
    engine: Engine, *, since: datetime | None = None, limit: int = 100, **filters: Unpack[Filters]
) -> list[Placed]:
    """Return kernels that passed and were timed, the largest speedup first, those under unusual settings last.

    A kernel has one line for each problem, precision, device model and other :data:`~kqueue.contract.RULES`, with the
    median of its measurements, so that a lucky one does not rank it. Reused verdicts do not count as measurements. A
    kernel that has an evaluation with ``filters`` is ranked by all of its measurements. With a batch, only measurements
    of the batch count.
    """
    chosen = select(Evaluation.problem_hash, Evaluation.kernel_hash).join(Kernel, ITS_KERNEL)
    chosen = chosen.join(Verdict, Verdict.evaluation_id == Evaluation.id).where(*conditions(filters))
    chosen = chosen if since is None else chosen.where(Verdict.finished_at >= since)
    batch, trials = filters.get("batch"), filters.get("trials")
    mine = Summary.batch == batch if batch is not None else no_trial(Summary.batch) if trials is None else true()
    return _ranking(engine, [tuple_(*_SAME).in_(chosen), mine], limit)


def _ranking(
    engine: Engine, wanted: Sequence[ColumnElement[bool]], limit: int, *, only_best: bool = False
) -> list[Placed]:
    middle = _medians(wanted, limit, only_best=only_best)
    with transaction(engine) as connection:
        # A producer's login cannot read the names of tokens.
        named = connection.scalar(select(func.has_column_privilege("tokens", "name", "SELECT")))
    producer = func.coalesce(Token.name, Evaluation.producer) if named else Evaluation.producer
    shown = select_of(Placed, middle, Evaluation, Verdict, Kernel, producer=producer)
    query = (
        select(*shown)
        .select_from(middle)
        .join(Evaluation, Evaluation.id == middle.c.evaluation_id)
        .join(Verdict, Verdict.evaluation_id == middle.c.evaluation_id)
        .join(Kernel, ITS_KERNEL)
        .outerjoin(Token, Token.id == Evaluation.token_id)
        .order_by(*_order(middle))
    )
    return fetch(engine, Placed, query)


def _order(rows: Subquery) -> tuple[ColumnElement[Any], ...]:
    return rows.c.settings != _USUAL, rows.c.speedup.desc().nulls_last(), rows.c.runtime_ms, rows.c.evaluation_id


def _medians(wanted: Sequence[ColumnElement[bool]], limit: int, *, only_best: bool) -> Subquery:
    """Return the query for the median measurement of each kernel for a problem in a precision on a device model.

    ``only_best`` leaves the best kernel of those by usual settings.
    """
    measured = _with_rules(
        select(Summary.evaluation_id, *_SAME, _PRECISION.label("precision"), Environment.device)
        .add_columns(Summary.speedup, Summary.runtime_ms)
        .select_from(Summary)
        .join(Evaluation, Evaluation.id == Summary.evaluation_id)
        .join(Verdict, Verdict.evaluation_id == Summary.evaluation_id)
        .join(Attempt, Attempt.id == Verdict.attempt_id)
        .outerjoin(Environment, Environment.hash == Attempt.environment_hash)
        .where(*MEASURED, *wanted)
    )
    one = measured.c
    alike: Any = {"partition_by": (one.problem_hash, one.kernel_hash, one.precision, one.device, one.settings)}
    upwards = (one.speedup.nulls_first(), one.runtime_ms.desc(), one.evaluation_id)
    every = select(
        measured,
        func.min(one.speedup).over(**alike).label("slowest"),
        func.max(one.speedup).over(**alike).label("fastest"),
        func.count().over(**alike).label("measured"),
        func.row_number().over(**alike, order_by=upwards).label("place"),
    ).subquery()
    middle = select(every).where(every.c.place == (every.c.measured + 1) // 2)
    if only_best:
        each = (every.c.problem_hash, every.c.precision, every.c.device)
        usual = middle.where(every.c.settings == _USUAL).ext(distinct_on(*each))
        every = usual.order_by(*each, *_order(every)).subquery()
        middle = select(every)
    return middle.order_by(*_order(every)).limit(limit).subquery()


def _with_rules(rows: Select[*tuple[Any, ...]]) -> Subquery:
    """Return rows with the column ``settings``, for the rules of each row's evaluation.

    Postgres takes 30 us to find rules, so it finds them once for equal settings, and once for all usual ones.
    """
    usual = Evaluation.settings.contains(_USUAL_ONES) & ~Evaluation.settings.has_key("tolerances")
    given = case((usual, _USUAL), else_=Evaluation.settings)
    every = rows.add_columns(given.label("given")).cte()
    rules = func.kqueue_rules(every.c.given, literal(RULES, JSONB), type_=JSONB).label("settings")
    # Otherwise conditions on the rules would move to the rows, and a join could repeat the work.
    found = select(every.c.given, rules).group_by(every.c.given).cte().prefix_with("MATERIALIZED")
    wanted = [column for column in every.c if column is not every.c.given]
    return select(*wanted, found.c.settings).join(found, found.c.given == every.c.given).subquery()


def records(engine: Engine, problem_hash: str, *, limit: int = 50) -> list[Record]:
    """Return the kernels that were faster than all before them, by median speedups, the latest first.

    Kernels that were first judged by unusual rules are left out.
    """
    every = medians_of(problem_hash)
    ruled = _with_rules(select(every).join(Evaluation, Evaluation.id == every.c.evaluation_id))
    medians = select(ruled).where(ruled.c.settings == _USUAL).subquery()
    first = (medians.c.at, medians.c.evaluation_id)
    before = func.max(medians.c.speedup).over(order_by=first, rows=(None, -1)).label("before")
    ordered = select(medians, before).subquery()
    query = (
        select(*select_of(Record, ordered, Evaluation))
        .join(Evaluation, Evaluation.id == ordered.c.evaluation_id)
        .where(ordered.c.speedup > func.coalesce(ordered.c.before, 0))
        .order_by(ordered.c.at.desc(), ordered.c.evaluation_id.desc())
        .limit(limit)
    )
    return fetch(engine, Record, query)


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
    """Return the evaluation to show for a kernel: its median valid measurement, or else its last evaluation."""
    times = (Summary.runtime_ms, Summary.evaluation_id)
    measured = select(Summary.evaluation_id).where(Summary.kernel_hash == kernel_hash, *MEASURED).order_by(*times)
    latest = select(Evaluation.id).where(Evaluation.kernel_hash == kernel_hash, REAL)
    with transaction(engine) as connection:
        found = (
            connection.scalars(measured).all()
            or connection.scalars(latest.order_by(Evaluation.submitted_at.desc(), Evaluation.id).limit(1)).all()
        )
    if not found:
        raise UnknownEvaluation(kernel_hash, what="the kernel")
    return found[len(found) // 2]
