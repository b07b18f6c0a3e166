"""Beginning attempts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, Final
from uuid import UUID

from pydantic import ValidationError
from sqlalchemy import ColumnElement, Connection, Engine, and_, any_, case, func, not_, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import aliased

from kqueue.contract import Request
from kqueue.errors import SchemaMismatch
from kqueue.states import EvaluationState
from kqueue.store import clean
from kqueue.store.engine import transaction
from kqueue.store.evaluations.conditions import EXPIRED, QUEUED
from kqueue.store.evaluations.history import History
from kqueue.store.evaluations.verdicts import expire
from kqueue.store.models import Attempt, Environment, Evaluation, Kernel, Problem, Worker

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


def claim(engine: Engine, evaluation_id: UUID, *, worker_id: UUID, lease_s: float) -> Claim | None:
    """Begin an attempt, if the evaluation is queued and due. Of any number of callers one gets it.

    The others get None. So does a caller if the evaluation is running, done, not due yet or unknown; if it waited
    longer than its producer allowed, which gives it its verdict ``expired`` here; if the worker is paused; or if the
    last attempt failed near this worker. In that case the next attempt is kept for some seconds for a worker on
    another slot, or better on another device. The message of an evaluation that stays queued is sent again.

    Args:
        engine: the database.
        evaluation_id: from the message.
        worker_id: a registered worker's.
        lease_s: how long the attempt counts as alive without a heartbeat, and a worker too.
    """
    with transaction(engine) as connection:
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
        alone = number > 1 and History.read(connection, evaluation_id).suspected
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
    return Claim(evaluation_id, attempt_id, number, row["lane"], alone, row)


def set_environment(engine: Engine, attempt_id: int, facts: dict[str, Any]) -> str:
    """Record what an attempt runs on, and return the environment's hash.

    Args:
        engine: the database.
        attempt_id: the attempt's row.
        facts: what numbers depend on, and nothing that changes between attempts. It must hold ``device``,
            ``torch``, ``python`` and ``host``, and may hold ``driver``, ``cuda``, ``triton`` and more.
    """
    known = clean.json(facts)
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
    row = {name: str(known[name]) for name in ("device", "torch", "python", "host")}
    row |= {name: str(known[name]) for name in ("driver", "cuda", "triton") if known.get(name) is not None}
    with transaction(engine) as connection:
        connection.execute(insert(Environment).values(hash=digest, facts=known, **row).on_conflict_do_nothing())
        connection.execute(update(Attempt).where(Attempt.id == attempt_id).values(environment_hash=digest))
    return digest


def _begin(connection: Connection, evaluation_id: UUID, worker_id: UUID, lease_s: float) -> dict[str, Any] | None:
    """Compare and set: return the request and the attempt's number, None if the evaluation cannot be had."""
    rows = connection.execute(
        update(Evaluation)
        .where(
            Evaluation.id == evaluation_id,
            QUEUED,
            Evaluation.available_at <= func.now(),
            not_(EXPIRED),
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
    return None if row is None else {str(name): value for name, value in row.items()}


def _better_elsewhere(worker_id: UUID, lease_s: float) -> ColumnElement[bool]:
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
