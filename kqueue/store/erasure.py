"""Erasure of an owner's work. The numbers that costs are added up from stay.

Each call is one or a few short transactions, in small batches, so that it can be interrupted and called again. The
login must be the owner of the tables.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from sqlalchemy import Engine, delete, exists, func, select, text, update

from kqueue.store.engine import transaction
from kqueue.store.evaluations import OPEN
from kqueue.store.models import Baseline, Batch, Evaluation, Kernel, Problem, SearchRun, Session, SharedProblem, Token

_log = logging.getLogger(__name__)

#: Hash of the empty sources to which erased evaluations refer. No source has it.
_GONE: Final = "0" * 64
#: Maximum number of evaluations that one transaction erases.
_BITE: Final = 500
#: Seconds between two looks for evaluations that workers have ended.
_LOOK_S: Final = 0.5
#: Statements that erase evaluations whose attempts have all ended: a late worker could still record a text.
_ERASE: Final = (
    text("INSERT INTO problems (hash, owner, source) VALUES (:gone, :owner, '') ON CONFLICT DO NOTHING"),
    text(
        "INSERT INTO kernels (hash, owner, backend, source) VALUES (:gone, :owner, 'torch', '') ON CONFLICT DO NOTHING"
    ),
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
        ), called AS (
            DELETE FROM callbacks USING few WHERE evaluation_id = few.id
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
    """The numbers of rows that were erased. ``left`` are evaluations that a worker executes: call again for these."""

    evaluations: int
    sources: int
    searches: int
    tokens: int
    left: int

    def __str__(self) -> str:
        return f"{self.evaluations} evaluations, {self.sources} sources, {self.searches} searches, {self.tokens} tokens"


def erase(engine: Engine, owner: str, *, cancel: Callable[[UUID], object], patience_s: float = 0.0) -> Erased:
    """Revoke an owner's tokens, cancel its evaluations, erase its finished work, and log the numbers.

    ``cancel`` cancels an evaluation, and stops it if it runs. The end of evaluations is awaited for ``patience_s``
    seconds.
    """
    whose = select(Token.id).where(Token.owner == owner)
    with transaction(engine) as connection:
        connection.execute(delete(Session).where(Session.token_id.in_(whose)))
        connection.execute(delete(SharedProblem).where(SharedProblem.owner == owner))
        valid = update(Token).where(Token.owner == owner, Token.revoked_at.is_(None))
        tokens = connection.execute(valid.values(revoked_at=func.now())).rowcount
        unfinished = connection.scalars(select(Evaluation.id).where(Evaluation.owner == owner, OPEN)).all()
    for identity in unfinished:
        cancel(identity)
    values = {"owner": owner, "gone": _GONE, "bite": _BITE}
    rest = select(func.count()).where(Evaluation.owner == owner, Evaluation.problem_hash != _GONE)
    evaluations, deadline = 0, time.monotonic() + patience_s
    while True:
        with transaction(engine) as connection:
            *_, number = [connection.execute(statement, values).rowcount for statement in _ERASE]
            left = connection.scalars(rest).one()
        evaluations += number
        if not number:
            if not left or time.monotonic() >= deadline:
                break
            time.sleep(_LOOK_S)
    with transaction(engine) as connection:
        searches = connection.execute(delete(SearchRun).where(SearchRun.owner == owner)).rowcount
        connection.execute(delete(Baseline).where(Baseline.owner == owner))
        its = exists().where(Evaluation.batch == Batch.name, Evaluation.owner == owner)
        connection.execute(delete(Batch).where(Batch.owner == owner, ~its))
        sources = 0
        for kind, of in ((Problem, Evaluation.problem_hash), (Kernel, Evaluation.kernel_hash)):
            used = exists().where(of == kind.hash, Evaluation.owner == owner)
            unused = delete(kind).where(kind.owner == owner, kind.hash != _GONE, ~used)
            sources += connection.execute(unused).rowcount
    erased = Erased(evaluations, sources, searches, tokens, left)
    _log.warning("work of the owner %s was erased: %s", owner, erased)
    return erased
