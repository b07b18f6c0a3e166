"""Writing evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID, uuid4

from psycopg.errors import ForeignKeyViolation
from sqlalchemy import Connection, Engine, func, or_, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError

from kqueue.contract import Request
from kqueue.errors import IdempotencyConflict, UnknownProblem
from kqueue.message import Message
from kqueue.store.engine import transaction
from kqueue.store.evaluations.publishing import MESSAGES, to_message
from kqueue.store.models import Evaluation, Kernel, Problem
from kqueue.store.sql import any_text, any_uuid

#: How often a submission is tried that meets the removal of rows that it shares.
_TRIES: Final = 5


@dataclass(frozen=True, slots=True)
class Submitted:
    """An accepted evaluation.

    Attributes:
        message: the message that has a worker execute it.
        created: False if an earlier submission under the same idempotency key made it.
    """

    message: Message
    created: bool

    @property
    def evaluation_id(self) -> UUID:
        """The evaluation's id."""
        return self.message.evaluation_id


class _Removed(Exception):
    """A row that was found is gone for its age (:func:`kqueue.store.retention.prune`): the next try writes it anew.

    For a problem or kernel Postgres says so itself, by a violation of a foreign key.
    """


def submit(engine: Engine, requests: Sequence[Request]) -> list[Submitted]:
    """Write evaluations, all or none, and return them in the order of ``requests``.

    A request whose idempotency key is known, from before or from earlier in ``requests``, comes back as the
    evaluation that has the key, with ``created`` False.

    Args:
        engine: the database.
        requests: the requests. Their lanes are resolved already, never ``auto``.

    Raises:
        IdempotencyConflict: a known key was given for another problem or kernel.
        UnknownProblem: a request names a problem that is not stored.
    """
    if not requests:
        return []
    for _ in range(_TRIES - 1):
        try:
            return _submit(engine, requests)
        except _Removed:
            continue
        except IntegrityError as error:
            if not isinstance(error.orig, ForeignKeyViolation):
                raise
    return _submit(engine, requests)


def _submit(engine: Engine, requests: Sequence[Request]) -> list[Submitted]:
    first: dict[str, int] = {}
    for i, request in enumerate(requests):
        if request.idempotency_key is not None:
            first.setdefault(request.idempotency_key, i)
    made = [i for i, r in enumerate(requests) if r.idempotency_key is None or first[r.idempotency_key] == i]
    # Ascending ids keep a batch in its order (`in_batch`), as all its rows have the same time of submission.
    ids = dict(zip(made, sorted(uuid4() for _ in made), strict=True))
    # One order for everybody: two submissions that share rows wait for each other instead of deadlocking.
    ordered = sorted(ids, key=lambda i: requests[i].idempotency_key or "")
    with transaction(engine) as connection:
        _write_sources(connection, requests)
        now = connection.scalars(select(func.now())).one()
        connection.execute(
            insert(Evaluation).on_conflict_do_nothing(index_elements=["idempotency_key"]),
            [_row(ids[i], requests[i], now) for i in ordered],
        )
        rows = connection.execute(
            MESSAGES.add_columns(Evaluation.idempotency_key).where(
                or_(Evaluation.id == any_uuid(ids.values()), Evaluation.idempotency_key == any_text(first))
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
    return [Submitted(to_message(row), created=ids.get(i) == row.id) for i, row in enumerate(found)]


def _write_sources(connection: Connection, requests: Sequence[Request]) -> None:
    """Write the problems and kernels that are not stored yet.

    Raises:
        UnknownProblem: a request names a problem that is neither stored nor given in another request.
    """
    problems = {r.problem_hash: {"hash": r.problem_hash, "source": r.problem} for r in requests if not r.names_problem}
    named = {r.problem_hash for r in requests if r.names_problem} - problems.keys()
    kernels = {r.kernel_hash: {"hash": r.kernel_hash, "backend": r.backend.value, "source": r.kernel} for r in requests}
    if named:
        stored = connection.scalars(select(Problem.hash).where(Problem.hash == any_text(named)))
        if unknown := named - set(stored):
            raise UnknownProblem(unknown)
    if problems:
        connection.execute(insert(Problem).on_conflict_do_nothing(), [problems[k] for k in sorted(problems)])
    connection.execute(insert(Kernel).on_conflict_do_nothing(), [kernels[k] for k in sorted(kernels)])


def _row(identity: UUID, request: Request, now: datetime) -> dict[str, Any]:
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
    }
