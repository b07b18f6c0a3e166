"""The life of an evaluation in Postgres: submitted, claimed, ended once.

Two rules carry everything. An attempt begins by compare-and-set on a queued evaluation, so that any
number of messages for it are harmless. It ends under a lock on the evaluation's row, and the first who
writes wins, so that judge, worker, sweeper and producer may all try and exactly one verdict comes of it.
Whoever holds an evaluation's row may then lock its attempt's, never the other way round.

Every function is one transaction unless it says otherwise. They raise
:class:`~kqueue.errors.DatabaseUnavailable` where Postgres cannot be reached, refuses, or does not answer
in time; nothing is half written then.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from functools import cached_property
from typing import Any, Final
from uuid import UUID, uuid4

from psycopg.errors import ForeignKeyViolation
from pydantic import ValidationError
from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    Row,
    RowMapping,
    Text,
    Uuid,
    and_,
    any_,
    case,
    false,
    func,
    literal,
    literal_column,
    not_,
    or_,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import ARRAY, insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import aliased

from kqueue import contract
from kqueue.categories import Blame, Category
from kqueue.contract import Deadlines, Outcome, Request
from kqueue.errors import IdempotencyConflict, SchemaMismatch, UnknownEvaluation, UnknownProblem
from kqueue.states import EvaluationState, Writer
from kqueue.store import clean, gpus
from kqueue.store.engine import transaction
from kqueue.store.models import Attempt, Environment, Evaluation, Kernel, Problem, Verdict, Worker

_log = logging.getLogger(__name__)

#: Notified with the evaluation's id when its verdict is committed.
VERDICTS_CHANNEL: Final = "kqueue_verdicts"
#: A producer sends its messages itself: for so long after the commit nobody else does.
PUBLISHING_S: Final = 10.0
#: For so long after a retry is due it is kept for a slot farther away from the one that failed. Most evaluations
#: take less, so such a slot becomes free meanwhile; and a retry that waits longer is better done anywhere.
_ELSEWHERE_S: Final = 10.0
#: After so many tries that took their worker or GPU with them a kernel is suspected.
_SUSPECT_AFTER: Final = 2
#: How often a submission is written that meets the removal of what it shares.
_SUBMIT_TRIES: Final = 5
#: The most rows that one call of the sweeper's functions ends.
_SWEEP_ROWS: Final = 1000


@dataclass(frozen=True, slots=True)
class Submitted:
    """An accepted evaluation, with what its message needs.

    Attributes:
        evaluation_id: its id, and its Celery task's.
        created: False where an earlier submission under the same idempotency key made it.
        lane: the lane whose queue the message goes to.
        label: one line for people, never a source.
        deadlines_s: sum of its phases' deadlines in seconds.
    """

    evaluation_id: UUID
    created: bool
    lane: str
    label: str
    deadlines_s: float


@dataclass(frozen=True)
class Claim:
    """An attempt that the caller, and nobody else, now executes.

    Attributes:
        evaluation_id: what to judge.
        attempt_id: the attempt's row.
        number: the attempt's number, from 1.
        lane: the lane that it was submitted to.
        alone: earlier tries took their worker or GPU with them: nothing else may use the device meanwhile.
        stored: the request, as it lies in the database.
    """

    evaluation_id: UUID
    attempt_id: int
    number: int
    lane: str
    alone: bool
    stored: Mapping[str, Any]

    @cached_property
    def request(self) -> Request:
        """Sources and settings, as submitted.

        Raises:
            SchemaMismatch: a producer of another version of kqueue wrote what this one cannot read.
        """
        try:
            return Request.model_validate(self.stored)
        except ValidationError as error:
            fault = error.errors()[0]
            where = ".".join(str(part) for part in fault["loc"])
            raise SchemaMismatch(
                f"this version of kqueue cannot read the stored request ({where}: {fault['msg']}): "
                "producer and worker are of different versions"
            ) from None


class Recorded(Enum):
    """What became of an outcome that was handed to :func:`finish`."""

    FINAL = "final"
    """It is the verdict."""
    RETRY = "retry"
    """The fleet failed; the evaluation is queued again."""
    LATE = "late"
    """The attempt or the evaluation had ended before: nothing changed but that the attempt is closed."""


def submit(engine: Engine, requests: Sequence[Request]) -> list[Submitted]:
    """Write evaluations, all or none, and return them in the order of ``requests``.

    Lanes are resolved already (never ``auto``). A request whose idempotency key is known, from before or
    from earlier in ``requests``, comes back as the evaluation that has it, with ``created`` False.

    Raises:
        IdempotencyConflict: a known key was given for another problem or kernel.
        UnknownProblem: a request names a problem that is not stored.
    """
    if not requests:
        return []
    for _ in range(_SUBMIT_TRIES - 1):
        try:
            return _submit(engine, requests)
        except _Removed:
            continue
        except IntegrityError as error:
            if not isinstance(error.orig, ForeignKeyViolation):
                raise
    return _submit(engine, requests)


def claim(engine: Engine, evaluation_id: UUID, *, worker_id: UUID, lease_s: float) -> Claim | None:
    """Begin an attempt, if the evaluation is queued and due; of any number of callers one gets it.

    None: it is running, done, not due yet, or unknown; or it has waited longer than its producer allowed
    and is given its ``expired`` verdict here; or the worker is paused; or the last attempt failed near this
    worker, and for some seconds the next one is kept for a worker farther away: on another slot, or better on
    another device. Where the evaluation stays queued its message is sent again.

    Args:
        engine: the database.
        evaluation_id: from the message.
        worker_id: a registered worker's.
        lease_s: how long the attempt counts as alive without a heartbeat, and a worker too.
    """
    with transaction(engine) as connection:
        rows = connection.execute(
            update(Evaluation)
            .where(
                Evaluation.id == evaluation_id,
                Evaluation.state == EvaluationState.QUEUED,
                Evaluation.available_at <= func.now(),
                not_(_EXPIRED),
                select(Worker.id).where(Worker.id == worker_id, Worker.paused.is_(None)).exists(),
                or_(Evaluation.attempts == 0, not_(_better_elsewhere(worker_id, lease_s))),
                Problem.hash == Evaluation.problem_hash,
                Kernel.hash == Evaluation.kernel_hash,
            )
            .values(state=EvaluationState.RUNNING, attempts=Evaluation.attempts + 1)
            .returning(
                Evaluation.attempts.label("number"),
                Evaluation.lane,
                Evaluation.settings,
                Evaluation.problem_label,
                Evaluation.kernel_label,
                Evaluation.batch,
                Evaluation.idempotency_key,
                Problem.source.label("problem"),
                Kernel.source.label("kernel"),
                Kernel.backend,
            )
        )
        row = rows.mappings().one_or_none()
        if row is None:
            _expire(connection, Evaluation.id == evaluation_id)
            # The message that brought it here is used up.
            connection.execute(
                update(Evaluation)
                .where(
                    Evaluation.id == evaluation_id,
                    Evaluation.state == EvaluationState.QUEUED,
                    Evaluation.published_at.is_not(None),
                )
                .values(published_at=None)
            )
            return None
        stored: dict[str, Any] = {str(name): value for name, value in row.items()}
        number: int = stored.pop("number")
        alone = number > 1 and _deaths(_tries(_ended(connection, evaluation_id))) >= _SUSPECT_AFTER
        attempt_id = connection.scalars(
            insert(Attempt)
            .values(
                evaluation_id=evaluation_id,
                number=number,
                worker_id=worker_id,
                lease_until=func.now() + timedelta(seconds=lease_s),
            )
            .returning(Attempt.id)
        ).one()
    return Claim(evaluation_id, attempt_id, number, stored["lane"], alone, stored)


def finish(
    engine: Engine,
    evaluation_id: UUID,
    number: int,
    outcome: Outcome,
    *,
    written_by: Writer,
    retry_delay_s: float,
    handed_back: bool = False,
) -> Recorded:
    """End an attempt with its outcome. The first who writes wins; calling it again does no harm.

    A failure of the fleet puts the evaluation back into the queue while it has tries left, due after
    ``retry_delay_s`` seconds, doubled for each further one. The one after two that took their worker or GPU
    with them runs alone, and is the last. Anything else is its verdict. An outcome that comes too late is
    logged. Characters and numbers that Postgres refuses are replaced (:mod:`kqueue.store.clean`).

    Args:
        engine: the database.
        evaluation_id: the evaluation.
        number: the attempt's number, as claimed.
        outcome: what it came to.
        written_by: the part of the fleet that records it.
        retry_delay_s: seconds before a second try.
        handed_back: the attempt was broken off because its worker was told to stop: it is no try, and the
            evaluation is due again at once.
    """
    with transaction(engine) as connection:
        recorded = _end(
            connection,
            evaluation_id,
            number,
            outcome,
            written_by=written_by,
            retry_delay_s=retry_delay_s,
            handed_back=handed_back,
        )
        if recorded is None or recorded is Recorded.LATE:
            _log_late(connection, evaluation_id, number, outcome, written_by)
    return recorded or Recorded.LATE


def cancel(engine: Engine, evaluation_id: UUID) -> bool:
    """End an evaluation as ``cancelled``; False if it had its verdict already.

    An attempt that runs stays open until its worker ends it.

    Raises:
        UnknownEvaluation: there is no such evaluation.
    """
    with transaction(engine) as connection:
        # A function of the database: producers have no right to write verdicts.
        cancelled: bool | None = connection.scalar(select(func.kqueue_cancel(evaluation_id)))
    if cancelled is None:
        raise UnknownEvaluation(evaluation_id)
    return cancelled


def verdict(engine: Engine, evaluation_id: UUID) -> contract.Verdict | None:
    """The evaluation's verdict; None while it has none.

    Raises:
        UnknownEvaluation: there is no such evaluation.
    """
    found = verdicts(engine, [evaluation_id])
    if not found and not existing(engine, [evaluation_id]):
        raise UnknownEvaluation(evaluation_id)
    return found.get(evaluation_id)


def verdicts(engine: Engine, ids: Collection[UUID]) -> dict[UUID, contract.Verdict]:
    """The verdicts of those of ``ids`` that have one."""
    with transaction(engine) as connection:
        rows = connection.execute(VERDICTS.where(Verdict.evaluation_id == _any_id(ids))).mappings()
        return {row["id"]: to_verdict(row) for row in rows}


def existing(engine: Engine, ids: Collection[UUID]) -> set[UUID]:
    """Those of ``ids`` that are evaluations."""
    with transaction(engine) as connection:
        return set(connection.scalars(select(Evaluation.id).where(Evaluation.id == _any_id(ids))))


def in_batch(engine: Engine, name: str) -> list[UUID]:
    """The evaluations of a batch, in the order in which they were submitted."""
    with transaction(engine) as connection:
        return list(
            connection.scalars(
                select(Evaluation.id).where(Evaluation.batch == name).order_by(Evaluation.submitted_at, Evaluation.id)
            )
        )


def set_environment(engine: Engine, attempt_id: int, facts: dict[str, Any]) -> str:
    """Say what an attempt runs on, and return the environment's hash.

    Args:
        engine: the database.
        attempt_id: the attempt's row.
        facts: what numbers depend on and nothing that changes between attempts; must hold ``device``,
            ``torch``, ``python`` and ``host``, may hold ``driver``, ``cuda``, ``triton`` and more.
    """
    known = clean.json(facts)
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
    row = {name: str(known[name]) for name in ("device", "torch", "python", "host")}
    row |= {name: str(known[name]) for name in ("driver", "cuda", "triton") if known.get(name) is not None}
    with transaction(engine) as connection:
        connection.execute(insert(Environment).values(hash=digest, facts=known, **row).on_conflict_do_nothing())
        connection.execute(update(Attempt).where(Attempt.id == attempt_id).values(environment_hash=digest))
    return digest


def due_for_publishing(engine: Engine, *, limit: int, patience_s: float = PUBLISHING_S) -> list[Submitted]:
    """Queued and due evaluations without a message, the longest waiting first.

    Those submitted less than ``patience_s`` seconds ago are left to their producers.
    """
    with transaction(engine) as connection:
        rows = connection.execute(
            _SUBMITTABLE.where(_unpublished(patience_s)).order_by(Evaluation.available_at).limit(limit)
        ).all()
    return [_submitted(row, created=False) for row in rows]


def published(engine: Engine) -> dict[str, set[UUID]]:
    """The queued evaluations whose messages should be in Redis, by lane."""
    found: dict[str, set[UUID]] = {}
    with transaction(engine) as connection:
        for identity, lane in connection.execute(
            select(Evaluation.id, Evaluation.lane).where(
                Evaluation.state == EvaluationState.QUEUED, Evaluation.published_at.is_not(None)
            )
        ):
            found.setdefault(lane, set()).add(identity)
    return found


def mark_published(engine: Engine, ids: Collection[UUID], *, lost: bool = False) -> None:
    """Note that the messages of ``ids`` are in Redis now; those that somebody claims meanwhile are passed over.

    With ``lost`` note that they are not, so that they are due for publishing.
    """
    free = (
        select(Evaluation.id)
        .where(Evaluation.id == _any_id(ids), Evaluation.state == EvaluationState.QUEUED)
        .with_for_update(skip_locked=True)
    )
    with transaction(engine) as connection:
        connection.execute(
            update(Evaluation).where(Evaluation.id.in_(free)).values(published_at=None if lost else func.now())
        )


def expire_queued(engine: Engine) -> int:
    """End those that waited longer than their producers allowed, as ``expired``; return how many."""
    with transaction(engine) as connection:
        return _expire(connection, literal(True))


def expire_leases(engine: Engine, *, retry_delay_s: float) -> list[tuple[UUID, Recorded]]:
    """End every attempt whose worker has been silent past its lease, as ``worker_lost``.

    One transaction each. An attempt that somebody else is ending at this moment is left to them.
    """
    with transaction(engine) as connection:
        overdue = connection.execute(
            select(Attempt.evaluation_id, Attempt.number)
            .where(_OVERDUE)
            .order_by(Attempt.lease_until)
            .limit(_SWEEP_ROWS)
        ).all()
    outcome = Outcome(
        category=Category.WORKER_LOST,
        message="the worker fell silent while it ran the evaluation",
        facts={"lease_expired": True},
    )
    ended: list[tuple[UUID, Recorded]] = []
    for evaluation_id, number in overdue:
        with transaction(engine) as connection:
            recorded = _end(
                connection,
                evaluation_id,
                number,
                outcome,
                written_by=Writer.SWEEPER,
                retry_delay_s=retry_delay_s,
                only_overdue=True,
            )
        if recorded is not None:
            ended.append((evaluation_id, recorded))
    return ended


def lose_worker(
    engine: Engine, worker_id: UUID, *, retry_delay_s: float, message: str, handed_back: bool = False
) -> list[tuple[UUID, Recorded]]:
    """End a worker's open attempts as ``worker_lost`` at once: whoever calls has seen it die.

    One transaction each.

    Args:
        engine: the database.
        worker_id: whose attempts.
        retry_delay_s: seconds before a second try.
        message: one line for people.
        handed_back: the worker was told to stop and its attempts are no tries, as for :func:`finish`.
    """
    with transaction(engine) as connection:
        running = connection.execute(
            select(Attempt.evaluation_id, Attempt.number).where(
                Attempt.worker_id == worker_id, Attempt.ended_at.is_(None)
            )
        ).all()
    outcome = Outcome(category=Category.WORKER_LOST, message=clean.text(message))
    return [
        (
            evaluation_id,
            finish(
                engine,
                evaluation_id,
                number,
                outcome,
                written_by=Writer.WORKER,
                retry_delay_s=retry_delay_s,
                handed_back=handed_back,
            ),
        )
        for evaluation_id, number in running
    ]


class _Removed(Exception):
    """What was found is gone for its age (:func:`kqueue.store.retention.prune`): the next try writes it anew.

    Of a problem or kernel Postgres says so itself, by a violation of a foreign key.
    """


def _submit(engine: Engine, requests: Sequence[Request]) -> list[Submitted]:
    first: dict[str, int] = {}
    for i, request in enumerate(requests):
        if request.idempotency_key is not None:
            first.setdefault(request.idempotency_key, i)
    made = [i for i, r in enumerate(requests) if r.idempotency_key is None or first[r.idempotency_key] == i]
    # Ascending: that is how a batch keeps its order (:func:`in_batch`), as all its rows are of one moment.
    ids = dict(zip(made, sorted(uuid4() for _ in made), strict=True))
    # One order for everybody: two submissions that share rows wait for each other instead of deadlocking.
    ordered = sorted(ids, key=lambda i: requests[i].idempotency_key or "")
    problems = {r.problem_hash: {"hash": r.problem_hash, "source": r.problem} for r in requests if not r.names_problem}
    named = {r.problem_hash for r in requests if r.names_problem} - problems.keys()
    kernels = {r.kernel_hash: {"hash": r.kernel_hash, "backend": r.backend.value, "source": r.kernel} for r in requests}
    with transaction(engine) as connection:
        if named:
            stored = connection.scalars(select(Problem.hash).where(Problem.hash == _any_text(named)))
            if unknown := named - set(stored):
                raise UnknownProblem(unknown)
        if problems:
            connection.execute(insert(Problem).on_conflict_do_nothing(), [problems[k] for k in sorted(problems)])
        connection.execute(insert(Kernel).on_conflict_do_nothing(), [kernels[k] for k in sorted(kernels)])
        now = connection.scalars(select(func.now())).one()
        connection.execute(
            insert(Evaluation).on_conflict_do_nothing(index_elements=["idempotency_key"]),
            [_evaluation_row(ids[i], requests[i], now) for i in ordered],
        )
        rows = connection.execute(
            _SUBMITTABLE.where(
                or_(Evaluation.id == _any_id(ids.values()), Evaluation.idempotency_key == _any_text(first))
            )
        ).all()
        by_id = {row.id: row for row in rows}
        by_key = {row.idempotency_key: row for row in rows}
        if not first.keys() <= by_key.keys():
            raise _Removed
        found = [by_id[ids[i]] if (k := r.idempotency_key) is None else by_key[k] for i, r in enumerate(requests)]
        conflicts = {
            row.idempotency_key
            for row, r in zip(found, requests, strict=True)
            if (row.problem_hash, row.kernel_hash) != (r.problem_hash, r.kernel_hash)
        }
        if conflicts:
            raise IdempotencyConflict(conflicts)
    return [_submitted(row, created=ids.get(i) == row.id) for i, row in enumerate(found)]


# What follows runs inside a transaction of the functions above.

#: Written out: a prepared statement whose states are parameters does without the indexes that are partial.
_QUEUED: Final = Evaluation.state == literal_column(f"'{EvaluationState.QUEUED}'")
_UNFINISHED: Final = Evaluation.state != literal_column(f"'{EvaluationState.DONE}'")

#: Coalesced, so that it can be denied.
_EXPIRED: Final = and_(
    _QUEUED,
    Evaluation.attempts == 0,
    func.coalesce(Evaluation.expires_at <= func.now(), false()),
)

#: Once more without coalescing, so that its index serves.
_EXPIRED_NOW: Final = and_(_EXPIRED, Evaluation.expires_at <= func.now())

_OVERDUE: Final = and_(Attempt.ended_at.is_(None), Attempt.lease_until < func.now())


def _unpublished(patience_s: float) -> ColumnElement[bool]:
    return and_(
        _QUEUED,
        Evaluation.available_at <= func.now(),
        Evaluation.published_at.is_(None),
        or_(Evaluation.attempts > 0, Evaluation.submitted_at <= func.now() - timedelta(seconds=patience_s)),
    )


#: Whether any evaluation has no verdict yet.
ANY_UNFINISHED: Final = select(Evaluation.id).where(_UNFINISHED).exists()
#: Whether :func:`due_for_publishing`, :func:`expire_queued` and :func:`expire_leases` would find anything.
ANY_UNPUBLISHED: Final = select(Evaluation.id).where(_unpublished(PUBLISHING_S)).exists()
ANY_EXPIRED: Final = select(Evaluation.id).where(_EXPIRED_NOW).exists()
ANY_OVERDUE: Final = select(Attempt.id).where(_OVERDUE).exists()

_SUBMITTABLE: Final = select(
    Evaluation.id,
    Evaluation.idempotency_key,
    Evaluation.problem_hash,
    Evaluation.kernel_hash,
    Evaluation.problem_label,
    Evaluation.kernel_label,
    Evaluation.lane,
    Evaluation.settings,
    Kernel.backend,
).join(Kernel, Kernel.hash == Evaluation.kernel_hash)

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
    )
    .join(Evaluation, Evaluation.id == Verdict.evaluation_id)
    .join(Kernel, Kernel.hash == Evaluation.kernel_hash)
    .outerjoin(Attempt, Attempt.id == Verdict.attempt_id)
    .outerjoin(Environment, Environment.hash == Attempt.environment_hash)
)


def to_verdict(row: RowMapping) -> contract.Verdict:
    """The verdict in a row of :data:`VERDICTS`."""
    known: dict[str, Any] = {str(name): value for name, value in row.items()}
    return contract.Verdict(evaluation_id=known.pop("id"), **known)


def _any_id(ids: Collection[UUID]) -> ColumnElement[Any]:
    return any_(literal(list(ids), ARRAY(Uuid)))


def _any_text(texts: Collection[str]) -> ColumnElement[Any]:
    return any_(literal(list(texts), ARRAY(Text)))


def _evaluation_row(identity: UUID, request: Request, now: datetime) -> dict[str, Any]:
    wait = request.queue_wait_s
    return {
        "id": identity,
        "problem_hash": request.problem_hash,
        "kernel_hash": request.kernel_hash,
        "problem_label": request.problem_label,
        "kernel_label": request.kernel_label,
        "lane": request.lane,
        "settings": request.settings.model_dump(mode="json"),
        "batch": request.batch,
        "idempotency_key": request.idempotency_key,
        "expires_at": None if wait is None else now + timedelta(seconds=wait),
    }


def _submitted(row: Row[*tuple[Any, ...]], *, created: bool) -> Submitted:
    problem = row.problem_label or row.problem_hash[:12]
    kernel = row.kernel_label or row.kernel_hash[:12]
    return Submitted(
        evaluation_id=row.id,
        created=created,
        lane=row.lane,
        label=" ".join(f"problem={problem} kernel={kernel} backend={row.backend} lane={row.lane}".split()),
        deadlines_s=Deadlines.model_validate(row.settings["deadlines"]).total_s,
    )


def _end(
    connection: Connection,
    evaluation_id: UUID,
    number: int,
    outcome: Outcome,
    *,
    written_by: Writer,
    retry_delay_s: float,
    handed_back: bool = False,
    only_overdue: bool = False,
) -> Recorded | None:
    """End attempt ``number``. None: unknown, or with ``only_overdue`` locked by another or alive again."""
    evaluation = connection.execute(
        select(Evaluation.state, Evaluation.settings["max_attempts"].as_integer().label("max_attempts"))
        .where(Evaluation.id == evaluation_id)
        .with_for_update(skip_locked=only_overdue)
    ).one_or_none()
    if evaluation is None:
        return None
    attempt_id = connection.scalar(
        select(Attempt.id)
        .where(
            Attempt.evaluation_id == evaluation_id,
            Attempt.number == number,
            Attempt.ended_at.is_(None),
            Attempt.lease_until < func.now() if only_overdue else literal(True),
        )
        .with_for_update()
    )
    if attempt_id is None:
        return None if only_overdue else Recorded.LATE
    fleet = outcome.category.blame is Blame.FLEET
    earlier = _ended(connection, evaluation_id) if fleet or number > 1 else []
    _close_attempt(connection, attempt_id, outcome, written_by=written_by, handed_back=handed_back)
    if outcome.category is Category.GPU_UNHEALTHY:
        device = connection.scalars(
            select(Worker.device).join(Attempt, Attempt.worker_id == Worker.id).where(Attempt.id == attempt_id)
        ).one()
        gpus.suspect(connection, device, reason=outcome.message, failed=True)
    if evaluation.state == EvaluationState.DONE:
        return Recorded.LATE
    if fleet:
        before = _tries(earlier)
        was_alone = _deaths(before) >= _SUSPECT_AFTER
        if handed_back or (len(before) + 1 < evaluation.max_attempts and not was_alone):
            delay = timedelta(seconds=0 if handed_back else retry_delay_s * 2 ** len(before))
            connection.execute(
                update(Evaluation)
                .where(Evaluation.id == evaluation_id)
                .values(state=EvaluationState.QUEUED, available_at=func.now() + delay, published_at=None)
            )
            return Recorded.RETRY
        deaths = _deaths(before) + _is_death(outcome.category.value, written_by)
        outcome = _last_of(outcome, len(before) + 1, deaths, alone=was_alone and deaths > _deaths(before))
    if earlier:
        told = [_told(attempt) for attempt in earlier]
        outcome = outcome.model_copy(update={"evidence": {**outcome.evidence, "attempts": told}})
    _conclude(connection, evaluation_id, outcome, written_by=written_by, attempt_id=attempt_id)
    return Recorded.FINAL


def _better_elsewhere(worker_id: UUID, lease_s: float) -> ColumnElement[bool]:
    """Whether a live worker should have the evaluation rather than this one: it is farther from the last failure."""
    failed, me, other = aliased(Worker), aliased(Worker), aliased(Worker)

    def distance(worker: type[Worker]) -> ColumnElement[int]:
        near = and_(worker.host == failed.host, worker.device == failed.device)
        return case((worker.name == failed.name, 0), (near, 1), else_=2)

    return (
        select(Attempt.id)
        .join(failed, failed.id == Attempt.worker_id)
        .join(me, me.id == worker_id)
        .join(
            other,
            and_(
                other.stopped_at.is_(None),
                other.heartbeat_at >= func.now() - timedelta(seconds=lease_s),
                other.paused.is_(None),
                Evaluation.lane == any_(other.lanes),
            ),
        )
        .where(
            Attempt.evaluation_id == Evaluation.id,
            Attempt.number == Evaluation.attempts,
            not_(Attempt.handed_back),
            Evaluation.available_at > func.now() - timedelta(seconds=_ELSEWHERE_S),
            distance(other) > distance(me),
        )
        .correlate(Evaluation)
        .exists()
    )


def _ended(connection: Connection, evaluation_id: UUID) -> list[Row[*tuple[Any, ...]]]:
    """An evaluation's ended attempts, in order."""
    return list(
        connection.execute(
            select(
                Attempt.number,
                Worker.name.label("worker"),
                Worker.device,
                Attempt.category,
                Attempt.message,
                Attempt.written_by,
                Attempt.handed_back,
                func.extract("epoch", Attempt.ended_at - Attempt.started_at).label("seconds"),
            )
            .join(Worker, Worker.id == Attempt.worker_id)
            .where(Attempt.evaluation_id == evaluation_id, Attempt.ended_at.is_not(None))
            .order_by(Attempt.number)
        )
    )


def _tries(attempts: Collection[Row[*tuple[Any, ...]]]) -> list[Row[*tuple[Any, ...]]]:
    """Those that count."""
    return [attempt for attempt in attempts if not attempt.handed_back]


def _deaths(tries: Collection[Row[*tuple[Any, ...]]]) -> int:
    """How many of them took their worker or GPU with them."""
    return sum(_is_death(attempt.category, attempt.written_by) for attempt in tries)


def _is_death(category: str, written_by: str) -> bool:
    """Whether an attempt that failed for the fleet's fault ended without a word of its judge, or with a failing GPU."""
    return written_by != Writer.JUDGE or category in (Category.WORKER_LOST, Category.GPU_UNHEALTHY)


def _last_of(outcome: Outcome, tries: int, deaths: int, *, alone: bool) -> Outcome:
    """A failure of the fleet that is final, saying so."""
    message, facts = outcome.message, outcome.facts
    if tries > 1:
        message = f"{message} (the last of {tries} tries)"
    if deaths >= _SUSPECT_AFTER:
        where = ", the last of them alone on its device" if alone else ""
        message = f"{message}; {deaths} tries took their worker or GPU with them{where}: the kernel is suspected"
        facts = {**facts, "suspected": True}
    return outcome.model_copy(update={"message": message, "facts": facts})


def _told(attempt: Row[*tuple[Any, ...]]) -> dict[str, Any]:
    """An earlier attempt, as a verdict's evidence tells of it."""
    told = {name: getattr(attempt, name) for name in ("number", "worker", "device", "category", "message")}
    told["seconds"] = round(float(attempt.seconds), 3)
    return told | ({"handed_back": True} if attempt.handed_back else {})


def _log_late(connection: Connection, evaluation_id: UUID, number: int, outcome: Outcome, written_by: Writer) -> None:
    """Tell of an outcome that somebody else was quicker than, where it differs from what stands."""
    standing = connection.execute(
        select(
            func.coalesce(Verdict.category, Attempt.category).label("category"),
            func.coalesce(Verdict.written_by, Attempt.written_by).label("written_by"),
        )
        .select_from(Evaluation)
        .outerjoin(Verdict, Verdict.evaluation_id == Evaluation.id)
        .outerjoin(Attempt, and_(Attempt.evaluation_id == Evaluation.id, Attempt.number == number))
        .where(Evaluation.id == evaluation_id)
    ).one_or_none()
    if standing is None or standing.category != outcome.category.value:
        _log.warning(
            "too late for a verdict: evaluation %s, attempt %d, %s by %s (%.200r); %s",
            evaluation_id,
            number,
            outcome.category,
            written_by,
            outcome.message,
            "no such evaluation" if standing is None else f"{standing.category} by {standing.written_by} stands",
        )


def _close_attempt(
    connection: Connection, attempt_id: int, outcome: Outcome, *, written_by: Writer, handed_back: bool = False
) -> None:
    connection.execute(
        update(Attempt)
        .where(Attempt.id == attempt_id)
        .values(
            ended_at=func.now(),
            category=outcome.category.value,
            message=clean.text(outcome.message),
            outcome=clean.json(outcome.model_dump()),
            written_by=written_by,
            handed_back=handed_back,
        )
    )


def _expire(connection: Connection, which: ColumnElement[bool]) -> int:
    """Give the expired among ``which`` their verdicts; those that another holds are left to them."""
    ids = connection.scalars(
        select(Evaluation.id).where(_EXPIRED_NOW, which).limit(_SWEEP_ROWS).with_for_update(skip_locked=True)
    ).all()
    outcome = Outcome(
        category=Category.EXPIRED, message="no worker began the evaluation within the queue wait that its producer set"
    )
    for evaluation_id in ids:
        _conclude(connection, evaluation_id, outcome, written_by=Writer.SWEEPER, attempt_id=None)
    return len(ids)


def _conclude(
    connection: Connection, evaluation_id: UUID, outcome: Outcome, *, written_by: Writer, attempt_id: int | None
) -> bool:
    """Write the verdict, unless there is one, and tell those who wait. The caller holds the evaluation's row."""
    written = connection.scalar(
        insert(Verdict)
        .values(
            evaluation_id=evaluation_id,
            attempt_id=attempt_id,
            category=outcome.category.value,
            blame=outcome.blame.value,
            compiled=outcome.compiled,
            correctness=outcome.correctness,
            phase=None if outcome.phase is None else outcome.phase.value,
            message=clean.text(outcome.message),
            runtime_ms=outcome.runtime_ms,
            baseline_ms=outcome.baseline_ms,
            speedup=outcome.speedup,
            facts=clean.json(outcome.facts),
            runtime=clean.json(outcome.runtime and outcome.runtime.model_dump()),
            baseline=clean.json(outcome.baseline and outcome.baseline.model_dump()),
            evidence=clean.json(outcome.evidence),
            log=clean.text(outcome.log),
            written_by=written_by,
        )
        .on_conflict_do_nothing()
        .returning(Verdict.evaluation_id)
    )
    connection.execute(update(Evaluation).where(Evaluation.id == evaluation_id).values(state=EvaluationState.DONE))
    connection.execute(select(func.pg_notify(VERDICTS_CHANNEL, str(evaluation_id))))
    return written is not None
