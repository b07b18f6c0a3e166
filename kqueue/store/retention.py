"""Retention: removal of old evaluations and logs in small batches.

Every function is one or a few short transactions and raises :class:`~kqueue.errors.DatabaseUnavailable`
if Postgres cannot be used or the caller lacks the right to remove.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Final, Self

from psycopg.errors import ForeignKeyViolation
from sqlalchemy import Engine, bindparam, delete, func, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import aliased

from kqueue.contract import TREE_LINE
from kqueue.store.engine import transaction
from kqueue.store.evaluations import ITS_KERNEL, ITS_PROBLEM
from kqueue.store.evaluations.conditions import IS_TREE
from kqueue.store.models import Attempt, Baseline, Batch, Evaluation, Kernel, Problem, Verdict, Worker
from kqueue.store.sql import any_text, any_uuid

#: Maximum number of rows of each kind that one call removes or empties.
_BITE: Final = 500
#: Age in days at which rows of stopped workers without attempts are removed.
_WORKERS_DAYS: Final = 7.0
#: Time since the last submission after which an empty batch is removed.
_BATCH_STAYS: Final = timedelta(hours=1)
#: Maximum length of the entries of evidence that are kept when a log is emptied.
_LONG_CHARACTERS: Final = 1000

_EMPTY: Final = text("""
    WITH old AS (
        SELECT evaluation_id FROM verdicts
        WHERE NOT (evidence ? 'emptied_at') AND finished_at < now() - :age
        ORDER BY finished_at
        LIMIT :limit
        FOR UPDATE SKIP LOCKED
    ), attempted AS (
        UPDATE attempts SET outcome = outcome - 'log' - 'evidence'
        FROM old WHERE attempts.evaluation_id = old.evaluation_id
    )
    UPDATE verdicts
    SET log = '', evidence = jsonb_build_object('emptied_at', now()) || coalesce(
        (SELECT jsonb_object_agg(key, value) FROM jsonb_each(evidence) WHERE length(value::text) <= :long), '{}'
    )
    FROM old WHERE verdicts.evaluation_id = old.evaluation_id
""").bindparams(bindparam("age"), limit=_BITE, long=_LONG_CHARACTERS)


@dataclass(frozen=True, slots=True)
class Pruned:
    """The numbers of rows that were removed or emptied. Sources are removed when no evaluation refers to them."""

    evaluations: int = 0
    problems: int = 0
    kernels: int = 0
    workers: int = 0
    logs: int = 0

    def __add__(self, other: Self) -> Pruned:
        return Pruned(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def __bool__(self) -> bool:
        return any(astuple(self))


def prune(engine: Engine, *, retention_days: float | None, log_retention_days: float | None) -> Pruned:
    """Remove and empty one batch of old rows. The result is empty if no more are left.

    After ``log_retention_days`` a verdict's log is emptied. It also loses the long entries of its evidence, where
    ``emptied_at`` records the time. After ``retention_days`` an evaluation is removed with its idempotency key, so the
    same key then creates a new evaluation. None keeps them. Baselines, their problems and environments are kept, except
    for probes. The results of probes are kept too.
    """
    pruned = Pruned()
    if retention_days is not None:
        pruned += _remove(engine, timedelta(days=retention_days))
    if log_retention_days is not None:
        with transaction(engine) as connection:
            emptied = connection.execute(_EMPTY, {"age": timedelta(days=log_retention_days)}).rowcount
        pruned += Pruned(logs=emptied)
    return pruned + Pruned(workers=_forget_workers(engine))


def _remove(engine: Engine, age: timedelta) -> Pruned:
    with transaction(engine) as connection:
        old = connection.execute(
            select(Evaluation.id, Evaluation.problem_hash, Evaluation.kernel_hash, Evaluation.batch, Evaluation.probe)
            .join(Verdict, Verdict.evaluation_id == Evaluation.id)
            .where(Verdict.finished_at < func.now() - age)
            .order_by(Verdict.finished_at)
            .limit(_BITE)
            .with_for_update(of=Verdict, skip_locked=True)
        ).all()
        ids = any_uuid([row.id for row in old])
        # The order follows the foreign keys: verdicts refer to attempts, and both refer to evaluations.
        connection.execute(delete(Verdict).where(Verdict.evaluation_id == ids))
        connection.execute(delete(Attempt).where(Attempt.evaluation_id == ids))
        connection.execute(delete(Evaluation).where(Evaluation.id == ids))
        # A batch with a recent submission can have evaluations that are not committed yet.
        connection.execute(
            delete(Batch).where(
                Batch.name == any_text({row.batch for row in old if row.batch is not None}),
                Batch.last_at < func.now() - _BATCH_STAYS,
                ~select(Evaluation.id).where(Evaluation.batch == Batch.name, Evaluation.owner == Batch.owner).exists(),
            )
        )
        # A probe's problem is never used again.
        probed = [row.problem_hash for row in old if row.probe]
        connection.execute(delete(Baseline).where(Baseline.problem_hash == any_text(probed)))
    pruned = Pruned(
        evaluations=len(old),
        problems=_forget(engine, Problem, {row.problem_hash for row in old}),
        kernels=_forget(engine, Kernel, {row.kernel_hash for row in old}),
    )
    if pruned.kernels or pruned.problems:
        pruned += Pruned(problems=_forget_trees(engine, age))
    return pruned


def _forget_trees(engine: Engine, age: timedelta) -> int:
    """Remove old trees that no source names, and return their number.

    A submission that names such a tree by its hash at the same moment ends with the advice to submit it again.
    """
    line = func.concat(TREE_LINE.rstrip(), " sha256:", Problem.hash)
    other = aliased(Problem)
    named = [
        select(kind.hash).where(kind.owner == Problem.owner, func.starts_with(kind.source, line)).exists()
        for kind in (Kernel, other)
    ]
    old = delete(Problem).where(IS_TREE, Problem.created_at < func.now() - age, *(~each for each in named))
    with transaction(engine) as connection:
        return len(connection.scalars(old.returning(Problem.hash)).all())


def _forget(engine: Engine, kind: type[Problem | Kernel], hashes: Collection[str]) -> int:
    """Remove sources without references and return their number."""
    try:
        with transaction(engine) as connection:
            unused = [~select(Evaluation.id).where(ITS_PROBLEM if kind is Problem else ITS_KERNEL).exists()]
            if kind is Problem:
                its = (Baseline.problem_hash == Problem.hash, Baseline.owner == Problem.owner)
                unused.append(~select(Baseline.problem_hash).where(*its).exists())
            statement = delete(kind).where(kind.hash == any_text(sorted(hashes)), *unused)
            return len(connection.scalars(statement.returning(kind.hash)).all())
    except IntegrityError as error:
        # One of them is just being submitted again. It is kept. Each half is tried again, so that the rest is removed.
        if not isinstance(error.orig, ForeignKeyViolation):
            raise
        half = len(hashes) // 2
        ordered = sorted(hashes)
        return _forget(engine, kind, ordered[:half]) + _forget(engine, kind, ordered[half:]) if half else 0


def _forget_workers(engine: Engine) -> int:
    """Remove rows of workers that stopped long ago and have no attempts, and return their number."""
    old = (
        select(Worker.id)
        .where(
            Worker.stopped_at < func.now() - timedelta(days=_WORKERS_DAYS),
            ~select(Attempt.id).where(Attempt.worker_id == Worker.id).exists(),
        )
        .limit(_BITE)
        .with_for_update(skip_locked=True)
    )
    with transaction(engine) as connection:
        return len(connection.scalars(delete(Worker).where(Worker.id.in_(old)).returning(Worker.id)).all())
