"""Claims, which begin attempts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
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
    text,
    update,
)
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import aliased

from kqueue.contract import Request, named_tree
from kqueue.errors import InvalidRequest, SchemaMismatch
from kqueue.states import EvaluationState
from kqueue.store import clean, gpus
from kqueue.store.budgets import PRODUCER
from kqueue.store.engine import notify, transaction
from kqueue.store.evaluations.conditions import EXPIRED, ITS_KERNEL, ITS_PROBLEM, QUEUED
from kqueue.store.evaluations.history import History
from kqueue.store.evaluations.reuse import answer, fingerprint
from kqueue.store.evaluations.verdicts import VERDICTS_CHANNEL, expire, warm_up_finish
from kqueue.store.models import Attempt, Environment, Evaluation, Gpu, Kernel, Problem, Worker
from kqueue.store.sql import any_text

#: Seconds for which a due retry is reserved for slots farther from the failed one. Most evaluations take less, so such
#: a slot becomes free in that time. Afterwards any slot can take the retry.
_ELSEWHERE_S: Final = 10.0
#: pydantic's types of the faults of a request that a newer producer wrote: an unknown field, an unknown word.
_OF_ANOTHER_VERSION: Final = frozenset({"extra_forbidden", "enum"})

#: Query for the upper limit of running attempts of an evaluation's token. It waits for other claims of that token, so
#: that :data:`_RUNNING` counts their attempts.
_LIMIT: Final = text("""
    SELECT e.producer, (t.limits ->> 'running')::int AS most, pg_advisory_xact_lock(hashtextextended(e.producer, 0))
    FROM evaluations AS e JOIN tokens AS t ON e.producer = 'token:' || t.id
    WHERE e.id = :id AND t.limits ? 'running'
""")
_RUNNING: Final = text("SELECT count(*) FROM attempts WHERE payer = :payer AND ended_at IS NULL")


@dataclass(frozen=True)
class Claim:
    """An attempt that only the caller now executes.

    Attributes:
        attempt_id: the attempt's row.
        number: the attempt's number, from 1.
        lane: the lane to which it was submitted.
        owner: the owner of the evaluation.
        alone: True if the attempt needs exclusive use of the device, because earlier tries lost their worker or GPU.
        hashes: the hashes of problem and kernel by which the request names its sources.
        stored: the request from the database.
    """

    evaluation_id: UUID
    attempt_id: int
    number: int
    lane: str
    owner: str
    alone: bool
    hashes: tuple[str, str]
    stored: Mapping[str, Any]

    @cached_property
    def request(self) -> Request:
        """The submitted sources and settings.

        Raise SchemaMismatch if another version of kqueue wrote a request that this one cannot read, and InvalidRequest
        if no version can read it, or the sources do not match their hashes.
        """
        try:
            request = Request.model_validate(self.stored)
        except ValidationError as error:
            faults = sorted(error.errors(), key=lambda fault: fault["type"] not in _OF_ANOTHER_VERSION)
            where = ".".join(str(part) for part in faults[0]["loc"])
            what = f"the stored request ({where}: {faults[0]['msg']}"[:300] + ")"
            if faults[0]["type"] in _OF_ANOTHER_VERSION:
                reason = f"this version of kqueue cannot read {what}: producer and worker are of different versions"
                raise SchemaMismatch(reason) from None
            raise InvalidRequest(f"{what} is invalid: submit it again") from None
        # Verdicts are reused by these hashes, and any producer can have written the sources.
        if (request.problem_hash, request.kernel_hash) != self.hashes:
            raise InvalidRequest("the stored sources do not match their hashes: submit them again")
        if request.tree_names != request.tree_texts.keys():
            raise InvalidRequest("a tree that the sources name is not stored any more: submit it again")
        return request


def claim(engine: Engine, evaluation_id: UUID, *, worker_id: UUID, lease_s: float) -> Claim | None:
    """Begin an attempt, if the evaluation is queued and due. Only one of several concurrent callers gets it.

    All other callers get None. The result is also None in these cases:

    - The evaluation is running, done, not due yet or unknown.
    - It waited longer than its producer allowed. It then ends as ``expired``.
    - An equal evaluation was judged while it waited. It then ends with that verdict
      (:mod:`kqueue.store.evaluations.reuse`).
    - The worker is paused, or its GPU is out of service.
    - Its token already runs as many attempts as its upper limit allows.
    - The last attempt failed near this worker. The next attempt is then reserved for some seconds for a worker on
      another slot, preferably on another device.

    The message of an evaluation that stays queued is sent again.

    Args:
        worker_id: a registered worker.
        lease_s: seconds without a heartbeat for which the attempt counts as alive, and a worker too.
    """
    with transaction(engine) as connection:
        ended: Collection[UUID] = answer(connection, [evaluation_id], live_s=lease_s)
        # This locks the token if it has an upper limit of running attempts.
        limit = None if ended else connection.execute(_LIMIT, {"id": evaluation_id}).one_or_none()
        has_room = limit is None or connection.scalar(_RUNNING, {"payer": limit.producer}) < limit.most
        row = _begin(connection, evaluation_id, worker_id, lease_s) if has_room and not ended else None
        if row is None and not ended:
            ended = expire(connection, Evaluation.id == evaluation_id)
            # The message that triggered this claim is consumed.
            connection.execute(
                update(Evaluation)
                .where(Evaluation.id == evaluation_id, QUEUED, Evaluation.published_at.is_not(None))
                .values(published_at=None)
            )
        alone = row is not None and row["number"] > 1 and History.read(connection, evaluation_id).suspected
        if row is not None:
            row["trees"] = _trees(connection, row)
    if row is None:
        notify(engine, VERDICTS_CHANNEL, ended)
        return None
    number: int = row.pop("number")
    attempt_id: int = row.pop("attempt_id")
    hashes = (row.pop("problem_hash"), row.pop("kernel_hash"))
    owner: str = row.pop("owner")
    del row["producer"]  # judges must not see it
    return Claim(evaluation_id, attempt_id, number, row["lane"], owner, alone, hashes, row)


def _trees(connection: Connection, row: Mapping[str, Any]) -> list[str]:
    """Return the texts of the trees that the sources of a claimed evaluation name."""
    hashes = {tree.hash for source in (row["problem"], row["kernel"]) if (tree := named_tree(source)) is not None}
    if not hashes:
        return []
    stored = select(Problem.source).where(Problem.hash == any_text(hashes), Problem.owner == row["owner"])
    return list(connection.scalars(stored).all())


def warm_up(engine: Engine, *, worker_id: UUID) -> None:
    """Claim and end an evaluation that does not exist, to prewarm the connection and the statements."""
    claim(engine, UUID(int=0), worker_id=worker_id, lease_s=0)
    warm_up_finish(engine)


def set_environment(engine: Engine, attempt_id: int, facts: dict[str, Any], *, conditions: str | None) -> str:
    """Record the environment of an attempt and the fingerprint of its worker. Return the environment's hash.

    Times depend on ``facts``, of which none changes between attempts. ``device``, ``torch``, ``python`` and ``host``
    are required. ``driver``, ``cuda``, ``triton`` and more are optional. ``conditions`` are all other properties on
    which this worker's verdicts depend, in any form, constant for its life. None forbids the reuse of its verdicts.
    """
    cleaned = clean.json(facts)
    digest = hashlib.sha256(json.dumps(cleaned, sort_keys=True).encode()).hexdigest()
    row = {name: str(cleaned[name]) for name in ("device", "torch", "python", "host")}
    row |= {name: str(cleaned[name]) for name in ("driver", "cuda", "triton") if cleaned.get(name) is not None}
    with transaction(engine) as connection:
        connection.execute(insert(Environment).values(hash=digest, facts=cleaned, **row).on_conflict_do_nothing())
        mark = None if conditions is None else fingerprint(digest, conditions)
        attempt = update(Attempt).where(Attempt.id == attempt_id)
        connection.execute(attempt.values(environment_hash=digest, fingerprint=mark))
        if mark is not None:
            whose = select(Attempt.worker_id).where(Attempt.id == attempt_id).scalar_subquery()
            changed = update(Worker).where(Worker.id == whose, Worker.fingerprint.is_distinct_from(mark))
            connection.execute(changed.values(fingerprint=mark))
    return digest


def _begin(connection: Connection, evaluation_id: UUID, worker_id: UUID, lease_s: float) -> dict[str, Any] | None:
    """Open the attempt by compare-and-set. Return the request and the attempt's id and number, or None."""
    values = {"evaluation": evaluation_id, "worker": worker_id, "lease": timedelta(seconds=lease_s)}
    row = connection.execute(_claiming(), values).mappings().one_or_none()
    return None if row is None else {str(name): value for name, value in row.items()}


@cache
def _claiming() -> Select[*tuple[Any, ...]]:
    """Return the claiming statement. It is one, to save round trips, and cached, because building it takes 2 ms."""
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
            ITS_PROBLEM,
            ITS_KERNEL,
        )
        .values(state=EvaluationState.RUNNING, attempts=Evaluation.attempts + 1)
        .returning(
            Evaluation.attempts.label("number"),
            Evaluation.problem_hash,
            Evaluation.kernel_hash,
            Evaluation.lane,
            Evaluation.producer,
            Evaluation.owner,
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
    """Return the condition that neither the worker is paused nor its GPU out of service."""
    # The GPU's own row is checked, because a supervisor that read it before it was drained can since have ended the
    # pause of its workers.
    out_of_service = select(Gpu.uuid).where(Gpu.uuid == Worker.device, not_(gpus.SERVES)).exists()
    return select(Worker.id).where(Worker.id == worker_id, Worker.paused.is_(None), not_(out_of_service)).exists()


def _better_elsewhere(worker_id: ColumnElement[UUID], lease: ColumnElement[timedelta]) -> ColumnElement[bool]:
    """Return the condition that a live worker is farther from the last failure than this one, and so preferred."""
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
