"""Erasure of an owner's work. The numbers that costs are added up from stay.

Each call is one or a few short transactions, in small batches, so that it can be interrupted and called again. The login
must be the owner of the tables.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from sqlalchemy import Engine, delete, exists, func, select, text, update

from kqueue.store.engine import transaction
from kqueue.store.evaluations import OPEN
from kqueue.store.models import (
    Baseline,
    Batch,
    Evaluation,
    Kernel,
    Problem,
    SearchRun,
    Session,
    SharedProblem,
    Token,
)

_log = logging.getLogger(__name__)

#: Hash of the empty sources to which erased evaluations refer. No source has it.
_GONE: Final = "0" * 64
#: Maximum number of evaluations that one transaction erases.
_BITE: Final = 500
#: Statements that erase evaluations whose attempts have all ended: a late worker could still record a text.
_ERASE: Final = (
    text("INSERT INTO problems (hash, owner, source) VALUES (:gone, :owner, '') ON CONFLICT DO NOTHING"),
    text("INSERT INTO kernels (hash, owner, backend, source) VALUES (:gone, :owner, 'torch', '') ON CONFLICT DO NOTHING"),
    text("""
        WITH few AS (
            SELECT e.id FROM evaluations AS e
            WHERE e.owner = :owner AND e.state = 'done' AND e.problem_hash <> :gone
              AND NOT EXISTS (SELECT FROM attempts AS a WHERE a.evaluation_id = e.id AND a.ended_at IS NULL)
            LIMIT :bite FOR UPDATE SKIP LOCKED
        ), tried AS (
            UPDATE attempts SET message = NULL, outcome = NULL FROM few WHERE evaluation_id = few.id
        ), summed AS (
            DELETE FROM summaries USING few WHERE evaluation_id = few.id
        ), judged AS (
            UPDATE verdicts SET category = 'cancelled', compiled = NULL, correctness = NULL, phase = NULL, message = '',
                log = '', facts = '{}', runtime_ms = NULL, baseline_ms = NULL, speedup = NULL, runtime = NULL,
                baseline = NULL, content = NULL, reusable = NULL, evidence = jsonb_strip_nulls(jsonb_build_object(
                    'emptied_at', now(), 'durations_s', evidence -> 'durations_s', 'cpu_s', evidence -> 'cpu_s'))
            FROM few WHERE evaluation_id = few.id
        )
        UPDATE evaluations SET problem_hash = :gone, kernel_hash = :gone, problem_label = NULL, kernel_label = NULL,
            batch = NULL, idempotency_key = NULL, settings = '{}', traceparent = NULL, session = NULL
        FROM few WHERE evaluations.id = few.id
    """),
)


@dataclass(frozen=True, slots=True)
class Erased:
    """The numbers of rows that were erased.

    Attributes:
        evaluations: evaluations without their sources, labels, settings, verdicts and logs. The times of their attempts
            stay.
        sources: removed problems and kernels.
        searches: removed searches, with their prompts and answers.
        tokens: revoked tokens.
        left: evaluations that a worker still executes. Another call erases them.
    """

    evaluations: int
    sources: int
    searches: int
    tokens: int
    left: int


def unfinished(engine: Engine, owner: str) -> list[UUID]:
    """Return the ids of an owner's evaluations without a verdict."""
    with transaction(engine) as connection:
        return list(connection.scalars(select(Evaluation.id).where(Evaluation.owner == owner, OPEN)))


def revoke(engine: Engine, owner: str) -> int:
    """Revoke an owner's tokens, end its browsers' sessions and stop sharing its problems. Return the number of tokens."""
    whose = select(Token.id).where(Token.owner == owner)
    with transaction(engine) as connection:
        connection.execute(delete(Session).where(Session.token_id.in_(whose)))
        connection.execute(delete(SharedProblem).where(SharedProblem.owner == owner))
        valid = update(Token).where(Token.owner == owner, Token.revoked_at.is_(None))
        return connection.execute(valid.values(revoked_at=func.now())).rowcount


def erase(engine: Engine, owner: str, *, tokens: int) -> Erased:
    """Erase the finished work of an owner, and log the numbers. The caller has revoked ``tokens`` tokens."""
    evaluations = 0
    values = {"owner": owner, "gone": _GONE, "bite": _BITE}
    while True:
        with transaction(engine) as connection:
            *_, number = [connection.execute(statement, values).rowcount for statement in _ERASE]
        evaluations += number
        if number == 0:
            break
    with transaction(engine) as connection:
        searches = connection.execute(delete(SearchRun).where(SearchRun.owner == owner)).rowcount
        connection.execute(delete(Baseline).where(Baseline.owner == owner))
        rest = Evaluation.owner == owner, Evaluation.problem_hash != _GONE
        connection.execute(
            delete(Batch).where(Batch.owner == owner, ~exists().where(Evaluation.batch == Batch.name, *rest))
        )
        sources = sum(
            connection.execute(
                delete(kind).where(
                    kind.owner == owner, kind.hash != _GONE, ~exists().where(its == kind.hash, Evaluation.owner == owner)
                )
            ).rowcount
            for kind, its in ((Problem, Evaluation.problem_hash), (Kernel, Evaluation.kernel_hash))
        )
        left = connection.scalars(select(func.count()).select_from(Evaluation).where(*rest)).one()
    erased = Erased(evaluations, sources, searches, tokens, left)
    _log.warning("the work of the owner %s was erased: %s", owner, erased)
    return erased
