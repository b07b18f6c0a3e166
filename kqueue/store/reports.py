"""What people ask of the database: one evaluation in full, lists of results, counts.

Every function is one transaction and raises :class:`~kqueue.errors.DatabaseUnavailable` where Postgres
cannot be used.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from sqlalchemy import (
    ColumnElement,
    Engine,
    RowMapping,
    Uuid,
    and_,
    any_,
    column,
    false,
    func,
    literal,
    or_,
    select,
    table,
    true,
    tuple_,
)
from sqlalchemy.dialects.postgresql import ARRAY

from kqueue import contract
from kqueue.categories import Blame, Category
from kqueue.contract import Backend, Request
from kqueue.errors import InvalidRequest, UnknownEvaluation
from kqueue.states import EvaluationState, Writer
from kqueue.store import evaluations
from kqueue.store.engine import transaction
from kqueue.store.models import Attempt, Environment, Evaluation, Kernel, Problem, Verdict, Worker

#: Hexadecimal digits of an evaluation's id that may stand for all of it.
MIN_PREFIX = 4


@dataclass(frozen=True, slots=True)
class AttemptDetail:
    """One attempt of an evaluation.

    Attributes:
        number: from 1.
        worker: the worker's node name.
        started_at: UTC.
        ended_at: None while it runs.
        category: what it came to; None while it runs.
        message: one line about that.
        written_by: who recorded it.
        environment: what it ran on, where it came to say so.
    """

    number: int
    worker: str
    started_at: datetime
    ended_at: datetime | None
    category: Category | None
    message: str | None
    written_by: Writer | None
    environment: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Detail:
    """One evaluation in full.

    Attributes:
        evaluation_id: its id.
        state: where it is in its life.
        lane: where it was submitted to.
        backend: what the kernel is written in.
        problem_label, problem_hash, problem: name, SHA-256 and source of the reference.
        kernel_label, kernel_hash, kernel: of the candidate.
        settings: as submitted, a :class:`kqueue.Settings` in JSON.
        batch: the producer's name for the batch.
        submitted_at, expires_at: UTC.
        attempts: in order.
        verdict: None while there is none.
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


@dataclass(frozen=True, slots=True)
class Result:
    """One line of a list of results; times in milliseconds, moments in UTC."""

    evaluation_id: UUID
    batch: str | None
    problem_label: str | None
    problem_hash: str
    kernel_label: str | None
    kernel_hash: str
    backend: Backend
    lane: str
    category: Category
    blame: Blame
    compiled: bool | None
    correctness: bool | None
    message: str
    runtime_ms: float | None
    baseline_ms: float | None
    speedup: float | None
    device: str | None
    attempts: int
    submitted_at: datetime
    finished_at: datetime


def resolve_id(engine: Engine, prefix: str) -> UUID:
    """The evaluation whose id is ``prefix`` or, from four digits on, the only one that begins with it.

    Raises:
        UnknownEvaluation: there is none.
        InvalidRequest: there are several.
    """
    digits = prefix.strip().lower().replace("-", "")
    if not MIN_PREFIX <= len(digits) <= 32 or not set(digits) <= set("0123456789abcdef"):
        raise UnknownEvaluation(prefix)
    first, last = UUID(digits.ljust(32, "0")), UUID(digits.ljust(32, "f"))
    with transaction(engine) as connection:
        found = connection.scalars(select(Evaluation.id).where(Evaluation.id.between(first, last)).limit(2)).all()
    if not found:
        raise UnknownEvaluation(prefix)
    if len(found) > 1:
        raise InvalidRequest(f"several evaluations begin with {prefix}: give more of the id")
    return found[0]


def show(engine: Engine, evaluation_id: UUID) -> Detail:
    """One evaluation in full.

    Raises:
        UnknownEvaluation: there is no such evaluation.
    """
    with transaction(engine) as connection:
        row = connection.execute(
            select(
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
                Worker.name,
                Attempt.started_at,
                Attempt.ended_at,
                Attempt.category,
                Attempt.message,
                Attempt.written_by,
                Environment.facts,
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
    return Detail(
        evaluation_id=evaluation_id,
        state=EvaluationState(row.state),
        lane=row.lane,
        backend=Backend(row.backend),
        problem_label=row.problem_label,
        problem_hash=row.problem_hash,
        problem=row.problem,
        kernel_label=row.kernel_label,
        kernel_hash=row.kernel_hash,
        kernel=row.kernel,
        settings=row.settings,
        batch=row.batch,
        submitted_at=row.submitted_at,
        expires_at=row.expires_at,
        attempts=tuple(
            AttemptDetail(
                number=a.number,
                worker=a.name,
                started_at=a.started_at,
                ended_at=a.ended_at,
                category=None if a.category is None else Category(a.category),
                message=a.message,
                written_by=None if a.written_by is None else Writer(a.written_by),
                environment=a.facts,
            )
            for a in attempts
        ),
        verdict=None if verdict is None else evaluations.to_verdict(verdict),
    )


def results(
    engine: Engine,
    *,
    category: Category | None = None,
    blame: Blame | None = None,
    problem: str | None = None,
    backend: Backend | None = None,
    since: datetime | None = None,
    batch: str | None = None,
    limit: int = 100,
) -> list[Result]:
    """Finished evaluations, the latest first.

    Args:
        engine: the database.
        category: only this one.
        blame: only this one.
        problem: a problem's label, or the beginning of its hash.
        backend: only kernels of this one.
        since: finished then or later.
        batch: only of this batch.
        limit: at most so many.
    """
    wanted: list[ColumnElement[bool]] = []
    if category is not None:
        wanted.append(Verdict.category == category.value)
    if blame is not None:
        wanted.append(Verdict.blame == blame.value)
    if problem is not None:
        wanted.append(_problem_is(problem))
    if backend is not None:
        wanted.append(Kernel.backend == backend.value)
    if since is not None:
        wanted.append(Verdict.finished_at >= since)
    if batch is not None:
        wanted.append(Evaluation.batch == batch)
    with transaction(engine) as connection:
        rows = connection.execute(
            select(
                Evaluation.id.label("evaluation_id"),
                Evaluation.batch,
                Evaluation.problem_label,
                Evaluation.problem_hash,
                Evaluation.kernel_label,
                Evaluation.kernel_hash,
                Kernel.backend,
                Evaluation.lane,
                Verdict.category,
                Verdict.blame,
                Verdict.compiled,
                Verdict.correctness,
                Verdict.message,
                Verdict.runtime_ms,
                Verdict.baseline_ms,
                Verdict.speedup,
                Environment.device,
                Evaluation.attempts,
                Evaluation.submitted_at,
                Verdict.finished_at,
            )
            .select_from(Verdict)
            .join(Evaluation, Evaluation.id == Verdict.evaluation_id)
            .join(Kernel, Kernel.hash == Evaluation.kernel_hash)
            .outerjoin(Attempt, Attempt.id == Verdict.attempt_id)
            .outerjoin(Environment, Environment.hash == Attempt.environment_hash)
            .where(*wanted)
            .order_by(Verdict.finished_at.desc(), Evaluation.id)
            .limit(limit)
        ).mappings()
        found = [{str(name): value for name, value in row.items()} for row in rows]
    for record in found:
        record |= {
            "backend": Backend(record["backend"]),
            "category": Category(record["category"]),
            "blame": Blame(record["blame"]),
        }
    return [Result(**record) for record in found]


def states(engine: Engine) -> dict[str, dict[EvaluationState, int]]:
    """The number of evaluations in each state, by lane."""
    counted: dict[str, dict[EvaluationState, int]] = {}
    with transaction(engine) as connection:
        for lane, state, number in connection.execute(
            select(Evaluation.lane, Evaluation.state, func.count())
            .group_by(Evaluation.lane, Evaluation.state)
            .order_by(Evaluation.lane)
        ):
            counted.setdefault(lane, dict.fromkeys(EvaluationState, 0))[EvaluationState(state)] = number
    return counted


def outcomes(engine: Engine, *, since: datetime | None = None, batch: str | None = None) -> dict[Category, int]:
    """How many evaluations came to each category, in the categories' order; those without any left out.

    Args:
        engine: the database.
        since: finished then or later.
        batch: only of this batch.
    """
    query = select(Verdict.category, func.count().label("number")).group_by(Verdict.category)
    if since is not None:
        query = query.where(Verdict.finished_at >= since)
    if batch is not None:
        query = query.join(Evaluation, Evaluation.id == Verdict.evaluation_id).where(Evaluation.batch == batch)
    with transaction(engine) as connection:
        counted = {row.category: row.number for row in connection.execute(query)}
    return {category: counted[category.value] for category in Category if category.value in counted}


def unfinished(engine: Engine, *, batch: str) -> list[UUID]:
    """The evaluations of a batch that have no verdict yet, the oldest first."""
    with transaction(engine) as connection:
        return list(
            connection.scalars(
                select(Evaluation.id)
                .where(Evaluation.batch == batch, Evaluation.state != EvaluationState.DONE)
                .order_by(Evaluation.submitted_at, Evaluation.id)
            )
        )


def backlog(engine: Engine) -> dict[str, dict[EvaluationState, int]]:
    """The number of evaluations that are queued and running, by lane. Finished ones are not counted."""
    counted: dict[str, dict[EvaluationState, int]] = {}
    open_states = (EvaluationState.QUEUED, EvaluationState.RUNNING)
    with transaction(engine) as connection:
        for lane, state, number in connection.execute(
            select(Evaluation.lane, Evaluation.state, func.count())
            .where(Evaluation.state != EvaluationState.DONE)
            .group_by(Evaluation.lane, Evaluation.state)
        ):
            counted.setdefault(lane, dict.fromkeys(open_states, 0))[EvaluationState(state)] = number
    return counted


def placed(engine: Engine, ids: Collection[UUID]) -> dict[UUID, str]:
    """The device (a GPU's UUID, or ``cpu``) of the attempt that each of ``ids`` got its verdict from, where one did."""
    with transaction(engine) as connection:
        rows = connection.execute(
            select(Verdict.evaluation_id, Worker.device)
            .join(Attempt, Attempt.id == Verdict.attempt_id)
            .join(Worker, Worker.id == Attempt.worker_id)
            .where(Verdict.evaluation_id == any_(literal(list(ids), ARRAY(Uuid))))
        )
        return {row.evaluation_id: row.device for row in rows}


def attempts_by_device(engine: Engine, *, since: datetime) -> dict[str, dict[Category, int]]:
    """What the attempts that began since came to, by device (a GPU's UUID, or ``cpu``) and category."""
    counted: dict[str, dict[Category, int]] = {}
    with transaction(engine) as connection:
        for device, category, number in connection.execute(
            select(Worker.device, Attempt.category, func.count())
            .join(Attempt, Attempt.worker_id == Worker.id)
            .where(Worker.heartbeat_at >= since, Attempt.started_at >= since, Attempt.category.is_not(None))
            .group_by(Worker.device, Attempt.category)
            .order_by(Worker.device, Attempt.category)
        ):
            counted.setdefault(device, {})[Category(category)] = number
    return counted


@dataclass(frozen=True, slots=True)
class Earlier:
    """The last evaluation of a request that was made under keys of one family.

    Attributes:
        evaluation_id: its id.
        stands: whether who asks again is to be given it: it is under way, or was answered a moment ago with
            something other than a failure of the fleet.
    """

    evaluation_id: UUID
    stands: bool


def earlier(engine: Engine, request: Request, *, family: str, within_s: float | None) -> Earlier | None:
    """The last evaluation of ``request``'s problem and kernel whose idempotency key begins with ``family``.

    Args:
        engine: the database.
        request: names problem and kernel.
        family: what the keys begin with.
        within_s: how many seconds an answer stands; None for ever.
    """
    answered = Verdict.blame.in_([Blame.NONE.value, Blame.CANDIDATE.value, Blame.PROBLEM.value])
    if within_s is not None:
        answered = and_(answered, Verdict.finished_at >= func.now() - timedelta(seconds=within_s))
    with transaction(engine) as connection:
        row = connection.execute(
            select(
                Evaluation.id,
                or_(Evaluation.state != EvaluationState.DONE, func.coalesce(answered, false())).label("stands"),
            )
            .outerjoin(Verdict, Verdict.evaluation_id == Evaluation.id)
            .where(
                Evaluation.problem_hash == request.problem_hash,
                Evaluation.kernel_hash == request.kernel_hash,
                Evaluation.idempotency_key.startswith(family, autoescape=True),
            )
            .order_by(Evaluation.submitted_at.desc(), Evaluation.id.desc())
            .limit(1)
        ).one_or_none()
    return None if row is None else Earlier(row.id, row.stands)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an evaluation is; moments in UTC.

    Attributes:
        evaluation_id: its id.
        state: where it is in its life.
        problem_label, kernel_label: as given.
        device: that of its last attempt: a GPU's UUID, or ``cpu``; None before the first.
        submitted_at: when it was accepted.
        started_at: when its last attempt began.
        finished_at: when it had its verdict.
        blame: of its verdict.
    """

    evaluation_id: UUID
    state: EvaluationState
    problem_label: str | None
    kernel_label: str | None
    device: str | None
    submitted_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    blame: Blame | None


def progress(engine: Engine, evaluation_id: UUID) -> Progress:
    """How far an evaluation is.

    Raises:
        UnknownEvaluation: there is no such evaluation.
    """
    with transaction(engine) as connection:
        row = connection.execute(_PROGRESS.where(Evaluation.id == evaluation_id)).mappings().one_or_none()
    if row is None:
        raise UnknownEvaluation(evaluation_id)
    return _progress(row)


def progress_of_batch(engine: Engine, batch: str, *, done: bool, limit: int) -> list[Progress]:
    """How far the evaluations of a batch are, the latest first: those that have their verdict, or the others."""
    state = Evaluation.state == EvaluationState.DONE if done else Evaluation.state != EvaluationState.DONE
    with transaction(engine) as connection:
        rows = connection.execute(
            _PROGRESS.where(Evaluation.batch == batch, state)
            .order_by(Evaluation.submitted_at.desc(), Evaluation.id.desc())
            .limit(limit)
        ).mappings()
        return [_progress(row) for row in rows]


_LAST: Final = (
    select(Attempt.started_at, Worker.device)
    .join(Worker, Worker.id == Attempt.worker_id)
    .where(Attempt.evaluation_id == Evaluation.id)
    .order_by(Attempt.number.desc())
    .limit(1)
    .lateral()
)
_PROGRESS: Final = (
    select(
        Evaluation.id.label("evaluation_id"),
        Evaluation.state,
        Evaluation.problem_label,
        Evaluation.kernel_label,
        _LAST.c.device,
        Evaluation.submitted_at,
        _LAST.c.started_at,
        Verdict.finished_at,
        Verdict.blame,
    )
    .select_from(Evaluation)
    .outerjoin(_LAST, true())
    .outerjoin(Verdict, Verdict.evaluation_id == Evaluation.id)
)


def _progress(row: RowMapping) -> Progress:
    known: dict[str, Any] = {str(name): value for name, value in row.items()}
    known["state"] = EvaluationState(row["state"])
    known["blame"] = None if row["blame"] is None else Blame(row["blame"])
    return Progress(**known)


@dataclass(frozen=True, slots=True)
class Listed:
    """One line of a list of evaluations, finished or not; times in milliseconds, moments in UTC."""

    evaluation_id: UUID
    state: EvaluationState
    batch: str | None
    problem_label: str | None
    problem_hash: str
    kernel_label: str | None
    kernel_hash: str
    backend: Backend
    lane: str
    attempts: int
    submitted_at: datetime
    category: Category | None
    blame: Blame | None
    message: str | None
    runtime_ms: float | None
    baseline_ms: float | None
    speedup: float | None
    finished_at: datetime | None


def listing(
    engine: Engine,
    *,
    state: EvaluationState | None = None,
    category: Category | None = None,
    blame: Blame | None = None,
    problem: str | None = None,
    backend: Backend | None = None,
    lane: str | None = None,
    batch: str | None = None,
    since: datetime | None = None,
    after: tuple[datetime, UUID] | None = None,
    limit: int = 100,
) -> list[Listed]:
    """Evaluations, the latest submitted first.

    Args:
        engine: the database.
        state: only those in this one.
        category: only those that came to this.
        blame: only those of this blame.
        problem: a problem's label, or the beginning of its hash.
        backend: only kernels of this one.
        lane: only those submitted to this one.
        batch: only of this batch.
        since: submitted then or later.
        after: ``submitted_at`` and id of the last one that the caller has: what follows it.
        limit: at most so many.
    """
    wanted: list[ColumnElement[bool]] = [
        wants == str(value)
        for wants, value in (
            (Evaluation.state, state),
            (Verdict.category, category),
            (Verdict.blame, blame),
            (Kernel.backend, backend),
            (Evaluation.lane, lane),
            (Evaluation.batch, batch),
        )
        if value is not None
    ]
    if problem is not None:
        wanted.append(_problem_is(problem))
    if since is not None:
        wanted.append(Evaluation.submitted_at >= since)
    if after is not None:
        wanted.append(tuple_(Evaluation.submitted_at, Evaluation.id) < tuple_(*map(literal, after)))
    with transaction(engine) as connection:
        rows = connection.execute(
            _LISTED.where(*wanted).order_by(Evaluation.submitted_at.desc(), Evaluation.id.desc()).limit(limit)
        ).mappings()
        return [_listed(row) for row in rows]


def finished_in(
    engine: Engine, batch: str, *, since: datetime | None, after: tuple[datetime, UUID] | None, limit: int
) -> list[Listed]:
    """The finished evaluations of a batch in the order in which they finished.

    Args:
        engine: the database.
        batch: its name.
        since: finished then or later.
        after: ``finished_at`` and id of the last one that the caller has: what follows it.
        limit: at most so many.
    """
    wanted: list[ColumnElement[bool]] = [Evaluation.batch == batch, Evaluation.state == EvaluationState.DONE]
    if since is not None:
        wanted.append(Verdict.finished_at >= since)
    if after is not None:
        wanted.append(tuple_(Verdict.finished_at, Evaluation.id) > tuple_(*map(literal, after)))
    with transaction(engine) as connection:
        rows = connection.execute(
            _LISTED.where(*wanted).order_by(Verdict.finished_at, Evaluation.id).limit(limit)
        ).mappings()
        return [_listed(row) for row in rows]


@dataclass(frozen=True, slots=True)
class BatchState:
    """How far a batch is.

    Attributes:
        total: its evaluations.
        queued, running, done: those in each state.
        categories: how many came to each.
        blames: the same by blame.
        submitted_at: when its first was accepted, UTC.
        finished_at: when its last one finished, UTC; None while one has not.
    """

    total: int
    queued: int
    running: int
    done: int
    categories: dict[Category, int]
    blames: dict[Blame, int]
    submitted_at: datetime
    finished_at: datetime | None


def batch_state(engine: Engine, batch: str) -> BatchState | None:
    """How far a batch is; None where no evaluation belongs to one of that name."""
    with transaction(engine) as connection:
        rows = connection.execute(
            select(
                Evaluation.state,
                Verdict.category,
                func.count().label("number"),
                func.min(Evaluation.submitted_at).label("first"),
                func.max(Verdict.finished_at).label("last"),
            )
            .outerjoin(Verdict, Verdict.evaluation_id == Evaluation.id)
            .where(Evaluation.batch == batch)
            .group_by(Evaluation.state, Verdict.category)
        ).all()
    if not rows:
        return None
    states = dict.fromkeys(EvaluationState, 0)
    counted: dict[str, int] = {}
    blames: dict[Blame, int] = {}
    for row in rows:
        states[EvaluationState(row.state)] += row.number
        if row.category is not None:
            counted[row.category] = row.number
            blame = Category(row.category).blame
            blames[blame] = blames.get(blame, 0) + row.number
    total = sum(states.values())
    return BatchState(
        total=total,
        queued=states[EvaluationState.QUEUED],
        running=states[EvaluationState.RUNNING],
        done=states[EvaluationState.DONE],
        categories={category: counted[category.value] for category in Category if category.value in counted},
        blames=blames,
        submitted_at=min(row.first for row in rows),
        finished_at=max(row.last for row in rows) if states[EvaluationState.DONE] == total else None,
    )


@dataclass(frozen=True, slots=True)
class Best:
    """The fastest kernel that passed for a problem, in a precision, on a device model; times in milliseconds."""

    problem_hash: str
    problem_label: str | None
    precision: str
    device: str | None
    kernel_hash: str
    kernel_label: str | None
    backend: Backend
    runtime_ms: float
    baseline_ms: float | None
    speedup: float | None
    evaluation_id: UUID
    finished_at: datetime


def best(
    engine: Engine,
    *,
    problem: str | None = None,
    precision: str | None = None,
    device: str | None = None,
    limit: int = 100,
) -> list[Best]:
    """The view ``best_verdicts``, the largest speedup first.

    Args:
        engine: the database.
        problem: a problem's label, or the beginning of its hash.
        precision: only this one.
        device: a device model's name, or a part of it.
        limit: at most so many.
    """
    wanted: list[ColumnElement[bool]] = []
    columns = _BEST.c
    if problem is not None:
        wanted.append(or_(columns.problem_label == problem, columns.problem_hash.startswith(problem, autoescape=True)))
    if precision is not None:
        wanted.append(columns.precision == precision)
    if device is not None:
        wanted.append(columns.device.icontains(device, autoescape=True))
    order = (columns.speedup.desc().nulls_last(), columns.problem_hash, columns.precision, columns.device)
    with transaction(engine) as connection:
        rows = connection.execute(select(_BEST).where(*wanted).order_by(*order).limit(limit)).mappings()
        found = [{str(name): value for name, value in row.items()} for row in rows]
    for record in found:
        record["backend"] = Backend(record["backend"])
    return [Best(**record) for record in found]


_BEST: Final = table("best_verdicts", *(column(field.name) for field in fields(Best)))
_LISTED: Final = (
    select(
        Evaluation.id.label("evaluation_id"),
        Evaluation.state,
        Evaluation.batch,
        Evaluation.problem_label,
        Evaluation.problem_hash,
        Evaluation.kernel_label,
        Evaluation.kernel_hash,
        Kernel.backend,
        Evaluation.lane,
        Evaluation.attempts,
        Evaluation.submitted_at,
        Verdict.category,
        Verdict.blame,
        Verdict.message,
        Verdict.runtime_ms,
        Verdict.baseline_ms,
        Verdict.speedup,
        Verdict.finished_at,
    )
    .join(Kernel, Kernel.hash == Evaluation.kernel_hash)
    .outerjoin(Verdict, Verdict.evaluation_id == Evaluation.id)
)


def _listed(row: RowMapping) -> Listed:
    known: dict[str, Any] = {str(name): value for name, value in row.items()}
    known |= {"state": EvaluationState(row["state"]), "backend": Backend(row["backend"])}
    if row["category"] is not None:
        known |= {"category": Category(row["category"]), "blame": Blame(row["blame"])}
    return Listed(**known)


def _problem_is(named: str) -> ColumnElement[bool]:
    """Whether a problem has this label, or a hash that begins so."""
    return or_(Evaluation.problem_label == named, Evaluation.problem_hash.startswith(named, autoescape=True))
