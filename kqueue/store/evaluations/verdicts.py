"""The ends of attempts and evaluations: all ways to write a verdict."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from datetime import timedelta
from enum import Enum
from functools import cache, partial
from typing import Final
from uuid import UUID

from sqlalchemy import ColumnElement, Connection, Engine, Executable, and_, bindparam, func, select, text, true, update
from sqlalchemy.dialects.postgresql import JSONB

from kqueue.categories import Blame, Category
from kqueue.contract import Outcome
from kqueue.errors import UnknownEvaluation
from kqueue.evidence import Facts
from kqueue.states import EvaluationState, Writer
from kqueue.store import clean, gpus
from kqueue.store.engine import notify, transaction
from kqueue.store.evaluations import order
from kqueue.store.evaluations.conditions import EXPIRED_INDEXED, OVERDUE
from kqueue.store.evaluations.history import History, is_death, is_suspected
from kqueue.store.evaluations.reuse import reusable
from kqueue.store.models import Attempt, Evaluation, Verdict, Worker
from kqueue.store.sql import any_uuid

_log = logging.getLogger(__name__)

#: Channel that is notified of an evaluation's id when its verdict is committed.
VERDICTS_CHANNEL: Final = "kqueue_verdicts"
#: Maximum number of rows that one call of the sweeper's functions ends.
_SWEEP_ROWS: Final = 1000


class Recorded(Enum):
    """The effect of an outcome that was passed to :func:`finish`."""

    FINAL = "final"
    """The outcome is the verdict."""
    RETRY = "retry"
    """The fleet failed, so the evaluation is queued again."""
    LATE = "late"
    """The attempt or the evaluation had already ended. Only the attempt is closed."""


#: Statement that writes a verdict. One function of the database writes all verdicts, also cancelled and reused ones.
_CONCLUDE: Final = text("SELECT kqueue_conclude(:verdict)").bindparams(bindparam("verdict", type_=JSONB))


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
    """End an attempt with its outcome. The first writer wins, and repeated calls are harmless.

    After a failure of the fleet the evaluation is queued again while it has tries left. It is due after
    ``retry_delay_s`` seconds, doubled for each further try. After two tries that lost their worker or GPU, the next try
    has exclusive use of its device and is the last. Any other outcome is the verdict. A late outcome is logged.
    Characters and numbers that Postgres refuses are replaced (:mod:`kqueue.store.clean`).

    Args:
        number: the attempt's number, as claimed.
        written_by: the process that records it.
        retry_delay_s: seconds before a second try.
        handed_back: the attempt was aborted because its worker was asked to stop. It does not count as a try, and the
            evaluation is due again at once.
    """
    with transaction(engine) as connection:
        ended = (connection, evaluation_id, number, outcome)
        recorded = _end(*ended, written_by=written_by, retry_delay_s=retry_delay_s, handed_back=handed_back)
        if recorded is None or recorded is Recorded.LATE:
            _log_late(*ended, written_by)
    if recorded is Recorded.FINAL:
        notify(engine, VERDICTS_CHANNEL, [evaluation_id])
    return recorded or Recorded.LATE


def warm_up_finish(engine: Engine) -> None:
    """End an attempt that does not exist, to prewarm the connection and the statements of :func:`finish`."""
    unknown = UUID(int=0)
    outcome = Outcome(category=Category.WORKER_LOST, message="warm-up")
    with transaction(engine) as connection:
        _end(connection, unknown, 1, outcome, written_by=Writer.JUDGE, retry_delay_s=0)
        _close_attempt(connection, unknown, 1, outcome, written_by=Writer.JUDGE, handed_back=False)


def cancel(engine: Engine, evaluation_id: UUID) -> bool:
    """End an evaluation as ``cancelled``, or return False if it already has a verdict.

    A running attempt stays open until its worker ends it. Raise UnknownEvaluation if no evaluation has this id.
    """
    with transaction(engine) as connection:
        # A function of the database does this, because producers lack the right to write verdicts.
        cancelled: bool | None = connection.scalar(select(func.kqueue_cancel(evaluation_id)))
    if cancelled is None:
        raise UnknownEvaluation(evaluation_id)
    notify(engine, VERDICTS_CHANNEL, [evaluation_id] if cancelled else [])
    return cancelled


def cancel_all(engine: Engine, ids: Collection[UUID]) -> tuple[set[UUID], set[UUID]]:
    """End evaluations as ``cancelled`` in one statement.

    Returns:
        The evaluations that were cancelled, without those that already had verdicts, and the subset with open attempts.
    """
    with transaction(engine) as connection:
        query = select(Evaluation.id).where(Evaluation.id == any_uuid(ids), func.kqueue_cancel(Evaluation.id))
        cancelled = set(connection.scalars(query))
        running = select(Attempt.evaluation_id).where(Attempt.ended_at.is_(None))
        stopping = set(connection.scalars(running.where(Attempt.evaluation_id == any_uuid(cancelled))))
    notify(engine, VERDICTS_CHANNEL, cancelled)
    return cancelled, stopping


def expire_queued(engine: Engine) -> int:
    """End evaluations that waited longer than their producers allowed as ``expired``, and return their number."""
    with transaction(engine) as connection:
        ended = expire(connection, true())
    notify(engine, VERDICTS_CHANNEL, ended)
    return len(ended)


def expire_leases(engine: Engine, *, retry_delay_s: float) -> list[tuple[UUID, Recorded]]:
    """End every attempt whose worker's lease has expired as ``worker_lost``.

    Each has a separate transaction. An attempt that another process is ending is skipped.
    """
    with transaction(engine) as connection:
        overdue = connection.execute(
            select(Attempt.evaluation_id, Attempt.number)
            .where(OVERDUE)
            .order_by(Attempt.lease_until)
            .limit(_SWEEP_ROWS)
        ).all()
    outcome = Outcome(
        category=Category.WORKER_LOST,
        message="the worker fell silent while it ran the evaluation",
        facts=Facts(lease_expired=True),
    )
    end = partial(_end, outcome=outcome, written_by=Writer.SWEEPER, retry_delay_s=retry_delay_s, only_overdue=True)
    ended: list[tuple[UUID, Recorded]] = []
    for evaluation_id, number in overdue:
        with transaction(engine) as connection:
            recorded = end(connection, evaluation_id, number)
        if recorded is not None:
            ended.append((evaluation_id, recorded))
    notify(engine, VERDICTS_CHANNEL, [identity for identity, recorded in ended if recorded is Recorded.FINAL])
    return ended


def lose_worker(
    engine: Engine,
    worker_id: UUID,
    *,
    retry_delay_s: float,
    message: str,
    evaluation_id: UUID | None = None,
    handed_back: bool = False,
) -> list[tuple[UUID, Recorded]]:
    """End a worker's open attempts as ``worker_lost`` at once, because the caller observed the worker's death.

    Each has a separate transaction. If the worker itself lives, only ``evaluation_id`` ends. ``message`` is one line
    for people. ``handed_back`` means that the worker was asked to stop, so its attempts do not count as tries.
    """
    with transaction(engine) as connection:
        running = connection.execute(
            select(Attempt.evaluation_id, Attempt.number).where(
                Attempt.worker_id == worker_id,
                Attempt.ended_at.is_(None),
                Attempt.evaluation_id == evaluation_id if evaluation_id is not None else true(),
            )
        ).all()
    outcome = Outcome(category=Category.WORKER_LOST, message=clean.text(message))
    end = partial(
        finish, engine, outcome=outcome, written_by=Writer.WORKER, retry_delay_s=retry_delay_s, handed_back=handed_back
    )
    return [(identity, end(identity, number)) for identity, number in running]


def expire(connection: Connection, which: ColumnElement[bool]) -> Sequence[UUID]:
    """Within the caller's transaction, end the expired evaluations among ``which`` and return them.

    Evaluations that another transaction has locked are skipped.
    """
    ids = connection.scalars(
        select(Evaluation.id).where(EXPIRED_INDEXED, which).limit(_SWEEP_ROWS).with_for_update(skip_locked=True)
    ).all()
    outcome = Outcome(
        category=Category.EXPIRED, message="no worker began the evaluation within the queue wait that its producer set"
    )
    for evaluation_id in ids:
        _conclude(connection, evaluation_id, outcome, written_by=Writer.SWEEPER, attempt_id=None)
    return ids


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
    """End an attempt. Return None if it is unknown, or with ``only_overdue`` if it is locked or no longer overdue."""
    evaluation = connection.execute(_locking(wait=not only_overdue), {"evaluation": evaluation_id}).one_or_none()
    if evaluation is None:
        return None
    fleet = outcome.category.blame is Blame.FLEET
    earlier = History.read(connection, evaluation_id) if fleet or number > 1 else History()
    ended = (connection, evaluation_id, number, outcome)
    attempt_id = _close_attempt(*ended, written_by=written_by, handed_back=handed_back, only_overdue=only_overdue)
    if attempt_id is None:
        return None if only_overdue else Recorded.LATE
    if evaluation.state == EvaluationState.DONE:
        return Recorded.LATE
    if fleet:
        # A producer's login can have written anything there.
        most = evaluation.max_attempts if isinstance(evaluation.max_attempts, int) else 1
        if handed_back or (earlier.tries + 1 < most and not earlier.suspected):
            delay = timedelta(seconds=0 if handed_back else retry_delay_s * 2**earlier.tries)
            connection.execute(
                update(Evaluation)
                .where(Evaluation.id == evaluation_id)
                .values(state=EvaluationState.QUEUED, available_at=func.now() + delay, published_at=None)
            )
            return Recorded.RETRY
        outcome = _last_of(outcome, earlier, died=is_death(outcome.category, written_by))
    if earlier.attempts:
        evidence = outcome.evidence.model_copy(update={"attempts": earlier.as_evidence()})
        outcome = outcome.model_copy(update={"evidence": evidence})
    _conclude(connection, evaluation_id, outcome, written_by=written_by, attempt_id=attempt_id)
    return Recorded.FINAL


def _last_of(outcome: Outcome, earlier: History, *, died: bool) -> Outcome:
    """Return the outcome of a final failure of the fleet, with a message that counts the tries."""
    message, facts = outcome.message, outcome.facts
    tries, deaths = earlier.tries + 1, earlier.deaths + died
    if tries > 1:
        message = f"{message} (the last of {tries} tries)"
    if is_suspected(deaths):
        where = ", the last one with exclusive use of its device" if earlier.suspected and died else ""
        message = f"{message}. {deaths} tries lost their worker or GPU{where}: the kernel is suspected"
        facts = facts.model_copy(update={"suspected": True})
    return outcome.model_copy(update={"message": message, "facts": facts})


def _log_late(connection: Connection, evaluation_id: UUID, number: int, outcome: Outcome, written_by: Writer) -> None:
    """Log an outcome that came later than another one, if the two differ."""
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
    if standing is None or standing.category != outcome.category:
        _log.warning(
            "too late for a verdict: evaluation %s, attempt %d, %s by %s (%.200r). %s",
            evaluation_id,
            number,
            outcome.category,
            written_by,
            outcome.message,
            "No such evaluation"
            if standing is None
            else f"{standing.category} by {standing.written_by} was recorded before",
        )


def _close_attempt(
    connection: Connection,
    evaluation_id: UUID,
    number: int,
    outcome: Outcome,
    *,
    written_by: Writer,
    handed_back: bool,
    only_overdue: bool = False,
) -> int | None:
    """End an open attempt and charge its producer. Return its id, or None if there is no open attempt."""
    values = {
        "of": evaluation_id,
        "nth": number,
        "category": outcome.category.value,
        "message": clean.text(outcome.message),
        "outcome": clean.json(outcome.model_dump()),
        "written_by": written_by,
        "handed_back": handed_back,
    }
    attempt_id: int | None = connection.scalar(_closing(only_overdue=only_overdue), values)
    if attempt_id is not None and outcome.category is Category.GPU_UNHEALTHY:
        device = connection.scalars(
            select(Worker.device).join(Attempt, Attempt.worker_id == Worker.id).where(Attempt.id == attempt_id)
        ).one()
        gpus.suspect(connection, device, reason=outcome.message, failed=True)
    return attempt_id


# Statements of each evaluation's end are cached, because building one takes longer than executing it.


@cache
def _locking(*, wait: bool) -> Executable:
    """Return the statement that locks an evaluation's row. Without ``wait`` it skips a locked row."""
    most = Evaluation.settings["max_attempts"].label("max_attempts")
    evaluation = select(Evaluation.state, most).where(Evaluation.id == bindparam("evaluation"))
    return evaluation.with_for_update(skip_locked=not wait)


@cache
def _closing(*, only_overdue: bool) -> Executable:
    """Return the statement that ends an open attempt, charges its producer and returns its id."""
    names = ("category", "message", "outcome", "written_by", "handed_back")
    closed = (
        update(Attempt)
        .where(
            Attempt.evaluation_id == bindparam("of"),
            Attempt.number == bindparam("nth"),
            OVERDUE if only_overdue else Attempt.ended_at.is_(None),
        )
        .values(ended_at=func.now(), **{name: bindparam(name) for name in names})
        .returning(Attempt.id, Attempt.evaluation_id, Attempt.started_at, Attempt.ended_at, Attempt.lease_until)
        .cte("closed")
    )
    return select(closed.c.id).add_cte(order.charge(closed))


def _conclude(
    connection: Connection, evaluation_id: UUID, outcome: Outcome, *, written_by: Writer, attempt_id: int | None
) -> None:
    """Write the verdict unless there is one. The caller holds the row's lock, and notifies after its commit."""
    verdict = {
        "evaluation_id": evaluation_id,
        "attempt_id": attempt_id,
        "category": outcome.category,
        "blame": outcome.blame,
        "compiled": outcome.compiled,
        "correctness": outcome.correctness,
        "phase": outcome.phase,
        "message": outcome.message,
        "runtime_ms": outcome.runtime_ms,
        "baseline_ms": outcome.baseline_ms,
        "speedup": outcome.speedup,
        "facts": outcome.facts.model_dump(),
        "runtime": outcome.runtime and outcome.runtime.model_dump(),
        "baseline": outcome.baseline and outcome.baseline.model_dump(),
        "evidence": outcome.evidence.model_dump(),
        "log": outcome.log,
        "written_by": written_by,
        "reusable": reusable(outcome),
    }
    connection.execute(_CONCLUDE, {"verdict": clean.json(verdict)})
