"""Submission of evaluations."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID, uuid4

from psycopg.errors import CheckViolation, ForeignKeyViolation
from pydantic import ValidationError
from sqlalchemy import Connection, Engine, Row, Text, bindparam, func, or_, select, text
from sqlalchemy.dialects.postgresql import ARRAY, insert
from sqlalchemy.exc import IntegrityError

from kqueue.contract import Request, Settings
from kqueue.errors import IdempotencyConflict, InvalidRequest, UnknownProblem
from kqueue.message import Message
from kqueue.states import Priority, Spent
from kqueue.store import budgets, callbacks, sharing
from kqueue.store.engine import notify, transaction, viewer
from kqueue.store.evaluations import order
from kqueue.store.evaluations.publishing import MESSAGES, to_message
from kqueue.store.evaluations.reuse import answer
from kqueue.store.models import ME, Evaluation, Kernel, Problem
from kqueue.store.sql import any_text, any_uuid

#: Channel that is notified when evaluations were submitted to a lane on which other evaluations wait.
SUBMISSIONS_CHANNEL: Final = "kqueue_submissions"
#: Maximum number of tries of a submission that conflicts with the removal of rows that it shares.
_TRIES: Final = 5


#: Statement that updates batches. A batch's row is written at most once a second, because its producers would block
#: each other otherwise. The order of names prevents deadlocks.
_ENLIST: Final = text("""
    INSERT INTO batches AS b (name, owner, last_at)
    SELECT given.name, me.owner, now() FROM unnest(:names) AS given (name), (SELECT kqueue_owner() AS owner) AS me
    WHERE NOT EXISTS (
        SELECT FROM batches AS known
        WHERE known.name = given.name AND known.owner = me.owner AND known.last_at > now() - interval '1 s'
    )
    ORDER BY given.name
    ON CONFLICT (name, owner) DO UPDATE SET last_at = greatest(b.last_at, excluded.last_at)
""").bindparams(bindparam("names", type_=ARRAY(Text)))


@dataclass(frozen=True, slots=True)
class Submitted:
    """An accepted evaluation.

    Attributes:
        message: the message with which a worker executes it.
        created: False if an earlier submission with the same idempotency key created it.
        reused: True if it already has a verdict, reused from an equal evaluation.
        next: True if it is among the next of its lane, so that the caller sends its message.
    """

    message: Message
    created: bool
    reused: bool = False
    next: bool = False

    @property
    def evaluation_id(self) -> UUID:
        """The evaluation's id."""
        return self.message.evaluation_id


class _Removed(Exception):
    """Retention removed an evaluation that was found before. The next try writes it again."""


def submit(
    engine: Engine,
    requests: Sequence[Request],
    *,
    slots: Mapping[str, int] | None = None,
    any_lane: Collection[str] = (),
    reuse_s: float | None = None,
    traceparent: str | None = None,
) -> list[Submitted]:
    """Write evaluations in one transaction, and return them in the order of ``requests``.

    If a request's idempotency key exists, in the database or earlier in ``requests``, the evaluation with that key is
    returned with ``created`` False. If an equal evaluation was judged before, the new one ends with its verdict in the
    same transaction (:mod:`kqueue.store.evaluations.reuse`).

    Args:
        requests: the requests. Their lanes are already resolved, never ``auto``.
        slots: the number of live workers of each lane, if the caller sends messages. While fewer evaluations wait on a
            lane than its window holds, the new ones are marked as ``next`` and count as sent. None leaves all messages
            to the fleet.
        any_lane: the idempotency keys of requests that accept any lane.
        reuse_s: seconds without a heartbeat for which a worker counts as alive. None reuses no verdict.
        traceparent: the trace to which they belong (:mod:`kqueue.tracing`).

    Raises:
        IdempotencyConflict: a key was used again for another problem, kernel, lane or settings, or to forbid reuse.
        UnknownProblem: a request names a problem that is not stored.
        BudgetSpent: a request that must be judged has a token whose budget is used up.
        AccessRefused: the limits of the agent's session are used up.
        InvalidRequest: settings exceed the limits of the database's login.
    """
    if not requests:
        return []
    for _ in range(_TRIES - 1):
        try:
            return _submit(engine, requests, slots, any_lane, reuse_s, traceparent)
        except _Removed:
            continue
        except IntegrityError as error:
            if isinstance(error.orig, CheckViolation):
                raise InvalidRequest(str(error.orig.diag.message_primary)) from None
            if not isinstance(error.orig, ForeignKeyViolation):
                raise
    return _submit(engine, requests, slots, any_lane, reuse_s, traceparent)


def _submit(
    engine: Engine,
    requests: Sequence[Request],
    slots: Mapping[str, int] | None,
    any_lane: Collection[str],
    reuse_s: float | None,
    traceparent: str | None,
) -> list[Submitted]:
    first: dict[str, int] = {}
    for i, request in enumerate(requests):
        if request.idempotency_key is not None:
            first.setdefault(request.idempotency_key, i)
    new = [i for i, r in enumerate(requests) if r.idempotency_key is None or first[r.idempotency_key] == i]
    # All rows have the same time of submission, so ascending ids preserve a batch's order (`in_batch`).
    ids = dict(zip(new, sorted(uuid4() for _ in new), strict=True))
    # A common order of rows makes submissions that share rows wait for each other instead of deadlocking.
    ordered = sorted(ids, key=lambda i: requests[i].idempotency_key or "")
    with transaction(engine) as connection:
        _write_sources(connection, requests)
        payers = [budgets.token_of(request.producer) for request in requests]
        now, of_tokens = budgets.look(connection, {token_id for token_id in payers if token_id is not None})
        spent = {token_id: budget for token_id, budget in of_tokens.items() if budget.spent}
        if spent:
            requests = [
                request.model_copy(update={"priority": Priority.IDLE})
                if payer is not None and payer in spent and spent[payer].then is Spent.LOWER
                else request
                for request, payer in zip(requests, payers, strict=True)
            ]
        # A token's running attempts decide how many of its evaluations are next, if it has an upper limit of them.
        limited = order.room(connection).keys() & {request.producer for request in requests}
        crowd, nexts = _places(connection, {i: requests[i].lane for i in new}, None if limited else slots)
        connection.execute(
            insert(Evaluation).on_conflict_do_nothing(index_elements=["owner", "idempotency_key"]),
            [_row(ids[i], requests[i], now, traceparent, published=i in nexts) for i in ordered],
        )
        found = _found(connection, requests, ids, any_lane)
        may = [identity for i, identity in ids.items() if found[i].id == identity and requests[i].reuse]
        reused = answer(connection, may, live_s=reuse_s) if reuse_s is not None else set[UUID]()
        created = [ids.get(i) == row.id for i, row in enumerate(found)]
        for row, payer, is_new in zip(found, payers, created, strict=True):
            # Existing evaluations and reused verdicts cost nothing.
            budget = None if payer is None else spent.get(payer)
            if is_new and row.id not in reused and budget is not None and budget.then is Spent.REFUSE:
                raise budgets.refusal(connection, budget)
        if any(created):
            budgets.check_session(connection, viewer())
        if names := {batch for i in ids if (batch := requests[i].batch) is not None}:
            connection.execute(_ENLIST, {"names": list(names)})
        callbacks.register(connection, {ids[i]: requests[i] for i in ids if created[i]})
    if crowd and any(created):
        notify(engine, SUBMISSIONS_CHANNEL, [""])
    return [
        Submitted(to_message(row), created[i], row.id in reused, created[i] and i in nexts and row.id not in reused)
        for i, row in enumerate(found)
    ]


def _found(
    connection: Connection, requests: Sequence[Request], ids: Mapping[int, UUID], any_lane: Collection[str]
) -> list[Row[*tuple[Any, ...]]]:
    """Return the row of each request: the one with its key, or the new one with its id in ``ids``.

    Raise IdempotencyConflict if a row with a known key has another verdict, and _Removed if the row is gone.
    """
    keys = {request.idempotency_key for request in requests if request.idempotency_key is not None}
    rows = connection.execute(
        MESSAGES.add_columns(Evaluation.idempotency_key, Evaluation.reuse).where(
            Evaluation.owner == ME,
            or_(Evaluation.id == any_uuid(ids.values()), Evaluation.idempotency_key == any_text(keys)),
        )
    ).all()
    by_id = {row.id: row for row in rows}
    by_key = {row.idempotency_key: row for row in rows}
    if not keys <= by_key.keys():
        raise _Removed
    found = [by_id[ids[i]] if (k := r.idempotency_key) is None else by_key[k] for i, r in enumerate(requests)]
    conflicts = {
        row.idempotency_key
        for row, r in zip(found, requests, strict=True)
        if not asks_for(r, row, any_lane=r.idempotency_key in any_lane)
    }
    if conflicts:
        raise IdempotencyConflict(conflicts)
    return found


def asks_for(request: Request, row: Row[*tuple[Any, ...]], *, any_lane: bool) -> bool:
    """Return True if a request asks for the verdict of an evaluation that has its key or was just written.

    Labels, batch, priority, producer and queue wait do not influence a verdict. ``any_lane`` accepts any lane. The row
    has ``problem_hash``, ``kernel_hash``, ``lane``, ``settings`` and ``reuse``.
    """
    if (row.problem_hash, row.kernel_hash) != (request.problem_hash, request.kernel_hash):
        return False
    if row.reuse and not request.reuse:  # a request that accepts a reused verdict accepts a new one too
        return False
    if row.lane != request.lane and not any_lane:
        return False
    if row.settings == request.settings.model_dump(mode="json"):
        return True
    try:
        # An older version wrote fewer settings.
        return Settings.model_validate(row.settings) == request.settings
    except ValidationError:
        return False


def _places(connection: Connection, lanes: Mapping[int, str], slots: Mapping[str, int] | None) -> tuple[bool, set[int]]:
    """Return whether other evaluations wait on these lanes or not all fit a window, and which entries fit."""
    if slots is None:
        return True, set()
    crowd, nexts = False, set[int]()
    for lane in sorted(set(lanes.values())):
        most = order.window(slots.get(lane, 0))
        # A function of the database counts, because callers see their own owner's evaluations only.
        waiting = connection.scalars(select(func.kqueue_waiting(lane, most))).one()
        entries = [i for i in lanes if lanes[i] == lane]
        crowd = crowd or waiting > 0 or len(entries) > most
        nexts.update(entries[: most - waiting])
    return crowd, nexts


def _write_sources(connection: Connection, requests: Sequence[Request]) -> None:
    """Write the problems, trees and kernels that are not stored yet. Raise UnknownProblem for an unknown name."""
    sources = {r.problem_hash: r.problem for r in requests if not r.names_problem}
    for request in requests:
        sources |= request.tree_texts
    problems = {name: {"hash": name, "source": source} for name, source in sources.items()}
    named = {name for r in requests for name in (*r.tree_names, *([r.problem_hash] if r.names_problem else []))}
    named -= problems.keys()
    kernels = {r.kernel_hash: {"hash": r.kernel_hash, "backend": r.backend, "source": r.kernel} for r in requests}
    if named:
        stored = connection.scalars(select(Problem.hash).where(Problem.hash == any_text(named), Problem.owner == ME))
        unknown = named - set(stored)
        if unknown and (unknown := unknown - sharing.copy(connection, unknown)):
            raise UnknownProblem(unknown)
    if problems:
        connection.execute(insert(Problem).on_conflict_do_nothing(), [problems[k] for k in sorted(problems)])
    # In an agent's session a kernel cannot be read before its evaluation is written, and RETURNING would read it.
    connection.execute(insert(Kernel).on_conflict_do_nothing().inline(), [kernels[k] for k in sorted(kernels)])


def _row(
    identity: UUID, request: Request, now: datetime, traceparent: str | None, *, published: bool
) -> dict[str, Any]:
    wait_s = request.queue_wait_s
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
        "expires_at": None if wait_s is None else now + timedelta(seconds=wait_s),
        "published_at": now if published else None,
        "priority": request.priority,
        "producer": request.producer or "",
        "reuse": request.reuse,
        "traceparent": traceparent,
    }
