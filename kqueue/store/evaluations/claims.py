"""Beginning attempts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, cached_property
from typing import Any, Final
from uuid import UUID

from pydantic import ValidationError
from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    Interval,
    Select,
    Uuid,
    and_,
    any_,
    bindparam,
    case,
    func,
    not_,
    or_,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import aliased

from kqueue.contract import Request
from kqueue.errors import SchemaMismatch
from kqueue.states import EvaluationState
from kqueue.store import clean, gpus
from kqueue.store.budgets import PRODUCER
from kqueue.store.engine import transaction
from kqueue.store.evaluations.conditions import EXPIRED, QUEUED
from kqueue.store.evaluations.history import History
from kqueue.store.evaluations.reuse import answer, fingerprint
from kqueue.store.evaluations.verdicts import expire, warm_up_finish
from kqueue.store.models import Attempt, Environment, Evaluation, Gpu, Kernel, Problem, Worker

#: A retry that is due is kept for a slot farther away from the one that failed, for so many seconds. Most evaluations
#: take less, so such a slot becomes free meanwhile; a retry that waits longer is better done anywhere.
_ELSEWHERE_S: Final = 10.0


@dataclass(frozen=True)
class Claim:
    """An attempt that the caller, and nobody else, now executes.

    Attributes:
        evaluation_id: what to judge.
        attempt_id: the attempt's row.
        number: the attempt's number, from 1.
        lane: the lane that it was submitted to.
        alone: True if earlier tries took their worker or GPU with them: nothing else may use the device meanwhile.
        hashes: of the problem and the kernel, by which the request names its sources.
        stored: the request, as it lies in the database.
    """

    evaluation_id: UUID
    attempt_id: int
    number: int
    lane: str
    alone: bool
    hashes: tuple[str, str]
    stored: Mapping[str, Any]

    @cached_property
    def request(self) -> Request:
        """Sources and settings, as submitted.

        Raises:
            SchemaMismatch: a producer of another version of kqueue wrote what this one cannot read, or the sources are
                not those that their hashes stand for.
        """
        try:
            request = Request.model_validate(self.stored)
        except ValidationError as error:
            fault = error.errors()[0]
            where = ".".join(str(part) for part in fault["loc"])
            raise SchemaMismatch(
                f"this version of kqueue cannot read the stored request ({where}: {fault['msg']}): "
                "producer and worker are of different versions"
            ) from None
        # Verdicts are found again by these, and any producer may have written the sources.
        if (request.problem_hash, request.kernel_hash) != self.hashes:
            raise SchemaMismatch("the stored sources are not those that their hashes stand for: store them anew")
        return request


def claim(engine: Engine, evaluation_id: UUID, *, worker_id: UUID, lease_s: float) -> Claim | None:
    """Begin an attempt, if the evaluation is queued and due. Of any number of callers one gets it.

    The others get None. So does a caller if the evaluation is running, done, not due yet or unknown; if it waited
    longer than its producer allowed, which gives it its verdict ``expired`` here; if an equal evaluation was judged
    while it waited, whose verdict it gets here (:mod:`kqueue.store.evaluations.reuse`); if the worker is paused, or its
    GPU out of service; or if the last attempt failed near this worker. In that case the next attempt is kept for some
    seconds for a worker on another slot, or better on another device. The message of an evaluation that stays queued is
    sent again.

    Args:
        engine: the database.
        evaluation_id: from the message.
        worker_id: a registered worker's.
        lease_s: how long the attempt counts as alive without a heartbeat, and a worker too.
    """
    with transaction(engine) as connection:
        if answer(connection, [evaluation_id], live_s=lease_s):
            return None
        row = _begin(connection, evaluation_id, worker_id, lease_s)
        if row is None:
            expire(connection, Evaluation.id == evaluation_id)
            # The message that brought it here is used up.
            connection.execute(
                update(Evaluation)
                .where(Evaluation.id == evaluation_id, QUEUED, Evaluation.published_at.is_not(None))
                .values(published_at=None)
            )
            return None
        number: int = row.pop("number")
        attempt_id: int = row.pop("attempt_id")
        hashes = (row.pop("problem_hash"), row.pop("kernel_hash"))
        del row["producer"]  # it is not for judges
        alone = number > 1 and History.read(connection, evaluation_id).suspected
    return Claim(evaluation_id, attempt_id, number, row["lane"], alone, hashes, row)


def warm_up(engine: Engine, *, worker_id: UUID) -> None:
    """Do for no evaluation what claiming and ending one takes, so that a process has it at hand when it needs it."""
    claim(engine, UUID(int=0), worker_id=worker_id, lease_s=0)
    warm_up_finish(engine)


def set_environment(engine: Engine, attempt_id: int, facts: dict[str, Any], *, conditions: str | None) -> str:
    """Record what an attempt runs on, and return the environment's hash. The worker's fingerprint follows from it.

    Args:
        engine: the database.
        attempt_id: the attempt's row.
        facts: what numbers depend on, and nothing that changes between attempts. It must hold ``device``,
            ``torch``, ``python`` and ``host``, and may hold ``driver``, ``cuda``, ``triton`` and more.
        conditions: what else this worker's verdicts depend on, in any form; the same for all of its life. None: none
            of them is reused.
    """
    known = clean.json(facts)
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
    row = {name: str(known[name]) for name in ("device", "torch", "python", "host")}
    row |= {name: str(known[name]) for name in ("driver", "cuda", "triton") if known.get(name) is not None}
    with transaction(engine) as connection:
        connection.execute(insert(Environment).values(hash=digest, facts=known, **row).on_conflict_do_nothing())
        mark = None if conditions is None else fingerprint(digest, conditions)
        told = update(Attempt).where(Attempt.id == attempt_id)
        connection.execute(told.values(environment_hash=digest, fingerprint=mark))
        if mark is not None:
            whose = select(Attempt.worker_id).where(Attempt.id == attempt_id).scalar_subquery()
            changed = update(Worker).where(Worker.id == whose, Worker.fingerprint.is_distinct_from(mark))
            connection.execute(changed.values(fingerprint=mark))
    return digest


def _begin(connection: Connection, evaluation_id: UUID, worker_id: UUID, lease_s: float) -> dict[str, Any] | None:
    """Compare and set, and open the attempt: return the request and the attempt's id and number.

    None if the evaluation cannot be had.
    """
    values = {"evaluation": evaluation_id, "worker": worker_id, "lease": timedelta(seconds=lease_s)}
    row = connection.execute(_claiming(), values).mappings().one_or_none()
    return None if row is None else {str(name): value for name, value in row.items()}


@cache
def _claiming() -> Select[*tuple[Any, ...]]:
    """Return the statement that claims: one, as each costs the slot a round trip; made once, as that takes 2 ms."""
    evaluation_id, worker_id = bindparam("evaluation", type_=Uuid[UUID]()), bindparam("worker", type_=Uuid[UUID]())
    lease = bindparam("lease", type_=Interval)
    begun = (
        update(Evaluation)
        .where(
            Evaluation.id == evaluation_id,
            QUEUED,
            Evaluation.available_at <= func.now(),
            not_(EXPIRED),
            _may_take(worker_id),
            or_(Evaluation.attempts == 0, not_(_better_elsewhere(worker_id, lease))),
            Problem.hash == Evaluation.problem_hash,
            Kernel.hash == Evaluation.kernel_hash,
        )
        .values(state=EvaluationState.RUNNING, attempts=Evaluation.attempts + 1)
        .returning(
            Evaluation.attempts.label("number"),
            Evaluation.problem_hash,
            Evaluation.kernel_hash,
            Evaluation.lane,
            Evaluation.producer,
            Evaluation.settings,
            Evaluation.problem_label,
            Evaluation.kernel_label,
            Evaluation.batch,
            Evaluation.idempotency_key,
            Problem.source.label("problem"),
            Kernel.source.label("kernel"),
            Kernel.backend,
        )
        .cte("begun")
    )
    attempt = (
        insert(Attempt)
        .from_select(
            ["evaluation_id", "number", "worker_id", "lease_until", "payer"],
            select(
                evaluation_id,
                begun.c.number,
                worker_id,
                func.now() + lease,
                case((begun.c.producer.startswith(PRODUCER), begun.c.producer)),
            ),
        )
        .returning(Attempt.id, Attempt.number)
        .cte("attempt")
    )
    return select(attempt.c.id.label("attempt_id"), begun).join(begun, begun.c.number == attempt.c.number)


def _may_take(worker_id: ColumnElement[UUID]) -> ColumnElement[bool]:
    """The condition that neither the worker is paused nor its GPU out of service.

    The GPU is asked itself: a supervisor that looked at it before it was drained may since have written that its
    workers go on.
    """
    out_of_service = select(Gpu.uuid).where(Gpu.uuid == Worker.device, not_(gpus.SERVES)).exists()
    return select(Worker.id).where(Worker.id == worker_id, Worker.paused.is_(None), not_(out_of_service)).exists()


def _better_elsewhere(worker_id: ColumnElement[UUID], lease: ColumnElement[timedelta]) -> ColumnElement[bool]:
    """The condition that a live worker is farther from the last failure than this one, and so should have it."""
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
                other.heartbeat_at >= func.now() - lease,
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
