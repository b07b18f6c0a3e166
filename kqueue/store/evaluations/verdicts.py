"""Ending attempts and evaluations: every way to write a verdict."""

from __future__ import annotations

import logging
from collections.abc import Collection
from datetime import timedelta
from enum import Enum
from functools import cache
from typing import Final
from uuid import UUID

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    Executable,
    and_,
    bindparam,
    func,
    literal,
    select,
    text,
    true,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB

from kqueue.categories import Blame, Category
from kqueue.contract import Outcome
from kqueue.errors import UnknownEvaluation
from kqueue.evidence import Facts
from kqueue.states import EvaluationState, Writer
from kqueue.store import clean, gpus
from kqueue.store.engine import transaction
from kqueue.store.evaluations import order
from kqueue.store.evaluations.conditions import EXPIRED_INDEXED, OVERDUE
from kqueue.store.evaluations.history import History, is_death, is_suspected
from kqueue.store.evaluations.reuse import reusable
from kqueue.store.models import Attempt, Evaluation, Verdict, Worker
from kqueue.store.sql import any_uuid

_log = logging.getLogger(__name__)

#: Notified by the database with the evaluation's id when its verdict is committed.
VERDICTS_CHANNEL: Final = "kqueue_verdicts"
#: The most rows that one call of the sweeper's functions ends.
_SWEEP_ROWS: Final = 1000


class Recorded(Enum):
    """The effect of an outcome that was handed to :func:`finish`."""

    FINAL = "final"
    """It is the verdict."""
    RETRY = "retry"
    """The fleet failed; the evaluation is queued again."""
    LATE = "late"
    """The attempt or the evaluation had ended before: nothing changed but that the attempt is closed."""


#: One function of the database writes verdicts, those of cancelled and of equal evaluations too.
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
    """End an attempt with its outcome. The first writer wins; calling it again does no harm.

    A failure of the fleet puts the evaluation back into the queue while it has tries left. It is due after
    ``retry_delay_s`` seconds, doubled for each further try. The try after two that took their worker or GPU with them
    runs alone, and is the last. Any other outcome is the verdict. An outcome that comes too late is logged. Characters
    and numbers that Postgres refuses are replaced (:mod:`kqueue.store.clean`).

    Args:
        engine: the database.
        evaluation_id: the evaluation.
        number: the attempt's number, as claimed.
        outcome: what it came to.
        written_by: the part of the fleet that records it.
        retry_delay_s: seconds before a second try.
        handed_back: the attempt was broken off because its worker was told to stop. It is no try, and the evaluation
            is due again at once.
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


def warm_up_finish(engine: Engine) -> None:
    """Do for no attempt what ending one takes, so that a process has it at hand when it needs it."""
    nobody = UUID(int=0)
    outcome = Outcome(category=Category.WORKER_LOST, message="nobody's")
    with transaction(engine) as connection:
        _end(connection, nobody, 1, outcome, written_by=Writer.JUDGE, retry_delay_s=0)
        _close_attempt(connection, nobody, 1, outcome, written_by=Writer.JUDGE, handed_back=False)


def cancel(engine: Engine, evaluation_id: UUID) -> bool:
    """End an evaluation as ``cancelled``; return False if it had its verdict already.

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


def cancel_all(engine: Engine, ids: Collection[UUID]) -> tuple[set[UUID], set[UUID]]:
    """End evaluations as ``cancelled``, in one statement.

    Returns:
        Those that were cancelled, as the others had their verdicts; and those of them whose attempts are open.
    """
    with transaction(engine) as connection:
        cancelled = set(
            connection.scalars(
                select(Evaluation.id).where(Evaluation.id == any_uuid(ids), func.kqueue_cancel(Evaluation.id))
            )
        )
        running = connection.scalars(
            select(Attempt.evaluation_id).where(
                Attempt.evaluation_id == any_uuid(cancelled), Attempt.ended_at.is_(None)
            )
        )
        return cancelled, set(running)


def expire_queued(engine: Engine) -> int:
    """End evaluations that waited longer than their producers allowed, as ``expired``; return how many."""
    with transaction(engine) as connection:
        return expire(connection, literal(True))


def expire_leases(engine: Engine, *, retry_delay_s: float) -> list[tuple[UUID, Recorded]]:
    """End every attempt whose worker has been silent past its lease, as ``worker_lost``.

    One transaction each. An attempt that somebody else is ending at this moment is left to them.
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
    engine: Engine,
    worker_id: UUID,
    *,
    retry_delay_s: float,
    message: str,
    evaluation_id: UUID | None = None,
    handed_back: bool = False,
) -> list[tuple[UUID, Recorded]]:
    """End a worker's open attempts as ``worker_lost`` at once. The caller has seen the worker die.

    One transaction each.

    Args:
        engine: the database.
        worker_id: whose attempts.
        evaluation_id: of this evaluation only, where the worker itself lives.
        retry_delay_s: seconds before a second try.
        message: one line for people.
        handed_back: the worker was told to stop and its attempts are no tries, as for :func:`finish`.
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
    return [
        (
            identity,
            finish(
                engine,
                identity,
                number,
                outcome,
                written_by=Writer.WORKER,
                retry_delay_s=retry_delay_s,
                handed_back=handed_back,
            ),
        )
        for identity, number in running
    ]


def expire(connection: Connection, which: ColumnElement[bool]) -> int:
    """Within the caller's transaction, end the expired evaluations among ``which``; return how many.

    Evaluations that another transaction holds are left to it.
    """
    ids = connection.scalars(
        select(Evaluation.id).where(EXPIRED_INDEXED, which).limit(_SWEEP_ROWS).with_for_update(skip_locked=True)
    ).all()
    outcome = Outcome(
        category=Category.EXPIRED, message="no worker began the evaluation within the queue wait that its producer set"
    )
    for evaluation_id in ids:
        _conclude(connection, evaluation_id, outcome, written_by=Writer.SWEEPER, attempt_id=None)
    return len(ids)


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
    evaluation = connection.execute(_locking(wait=not only_overdue), {"evaluation": evaluation_id}).one_or_none()
    if evaluation is None:
        return None
    fleet = outcome.category.blame is Blame.FLEET
    earlier = History.read(connection, evaluation_id) if fleet or number > 1 else History()
    attempt_id = _close_attempt(
        connection,
        evaluation_id,
        number,
        outcome,
        written_by=written_by,
        handed_back=handed_back,
        only_overdue=only_overdue,
    )
    if attempt_id is None:
        return None if only_overdue else Recorded.LATE
    if evaluation.state == EvaluationState.DONE:
        return Recorded.LATE
    if fleet:
        if handed_back or (earlier.tries + 1 < evaluation.max_attempts and not earlier.suspected):
            delay = timedelta(seconds=0 if handed_back else retry_delay_s * 2**earlier.tries)
            connection.execute(
                update(Evaluation)
                .where(Evaluation.id == evaluation_id)
                .values(state=EvaluationState.QUEUED, available_at=func.now() + delay, published_at=None)
            )
            return Recorded.RETRY
        outcome = _last_of(outcome, earlier, died=is_death(outcome.category, written_by))
    if earlier.attempts:
        evidence = outcome.evidence.model_copy(update={"attempts": earlier.told()})
        outcome = outcome.model_copy(update={"evidence": evidence})
    _conclude(connection, evaluation_id, outcome, written_by=written_by, attempt_id=attempt_id)
    return Recorded.FINAL


def _last_of(outcome: Outcome, earlier: History, *, died: bool) -> Outcome:
    """Return a failure of the fleet that is final, with a message that says so.

    Args:
        outcome: the last try's.
        earlier: the attempts before it.
        died: the last try took its worker or GPU with it too.
    """
    message, facts = outcome.message, outcome.facts
    tries, deaths = earlier.tries + 1, earlier.deaths + died
    if tries > 1:
        message = f"{message} (the last of {tries} tries)"
    if is_suspected(deaths):
        where = ", the last of them alone on its device" if earlier.suspected and died else ""
        message = f"{message}; {deaths} tries took their worker or GPU with them{where}: the kernel is suspected"
        facts = facts.model_copy(update={"suspected": True})
    return outcome.model_copy(update={"message": message, "facts": facts})


def _log_late(connection: Connection, evaluation_id: UUID, number: int, outcome: Outcome, written_by: Writer) -> None:
    """Log an outcome that somebody else was quicker than, if it differs from the one that stands."""
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
            "too late for a verdict: evaluation %s, attempt %d, %s by %s (%.200r); %s",
            evaluation_id,
            number,
            outcome.category,
            written_by,
            outcome.message,
            "no such evaluation" if standing is None else f"{standing.category} by {standing.written_by} stands",
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
    """End an open attempt, and count its seconds as used by its producer; return its id, or None if there is none."""
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


# Statements of each evaluation's end are made once: making one takes longer than having it executed.


@cache
def _locking(*, wait: bool) -> Executable:
    """Lock an evaluation's row, or not if another has it and ``wait`` is False."""
    most = Evaluation.settings["max_attempts"].as_integer().label("max_attempts")
    evaluation = select(Evaluation.state, most).where(Evaluation.id == bindparam("evaluation"))
    return evaluation.with_for_update(skip_locked=not wait)


@cache
def _closing(*, only_overdue: bool) -> Executable:
    """End an open attempt, charge its producer, and return its id."""
    told = ("category", "message", "outcome", "written_by", "handed_back")
    closed = (
        update(Attempt)
        .where(
            Attempt.evaluation_id == bindparam("of"),
            Attempt.number == bindparam("nth"),
            OVERDUE if only_overdue else Attempt.ended_at.is_(None),
        )
        .values(ended_at=func.now(), **{name: bindparam(name) for name in told})
        .returning(Attempt.id, Attempt.evaluation_id, Attempt.started_at, Attempt.ended_at, Attempt.lease_until)
        .cte("closed")
    )
    return select(closed.c.id).add_cte(order.charge(closed))


def _conclude(
    connection: Connection, evaluation_id: UUID, outcome: Outcome, *, written_by: Writer, attempt_id: int | None
) -> None:
    """Write the verdict, unless there is one, and notify those who wait. The caller holds the evaluation's row."""
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
