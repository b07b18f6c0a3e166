"""SQL conditions on evaluations and attempts."""

from __future__ import annotations

from typing import Final

from sqlalchemy import and_, false, func, literal_column, select

from kqueue.contract import TESTS_LINE, Backend
from kqueue.states import EvaluationState
from kqueue.store.models import Attempt, Evaluation, Kernel, Problem

#: States are written out, as a prepared statement whose states are parameters cannot use the partial indexes.
QUEUED: Final = Evaluation.state == literal_column(f"'{EvaluationState.QUEUED}'")
#: True for an evaluation that has no verdict yet.
OPEN: Final = Evaluation.state != literal_column(f"'{EvaluationState.DONE}'")
#: True for an evaluation that no worker began in the time that its producer allowed. Coalesced, so that ``NOT`` works.
EXPIRED: Final = and_(QUEUED, Evaluation.attempts == 0, func.coalesce(Evaluation.expires_at <= func.now(), false()))
#: The same, with a second comparison that can use the index.
EXPIRED_INDEXED: Final = and_(EXPIRED, Evaluation.expires_at <= func.now())
#: True for an evaluation that somebody asked for. The others are the fleet's own (:mod:`kqueue.store.probes`), which
#: are nobody's: no report counts or lists them, no producer pays for them.
REAL: Final = Evaluation.probe.is_(False)
#: True for a problem or kernel, of the statement around it, that no probe is made of, nor tests of a repository.
#: Indexes have the probes. Of a long source that is not compressed Postgres reads the beginning alone.
REAL_PROBLEM: Final = and_(
    ~select(Evaluation.id).where(Evaluation.problem_hash == Problem.hash, Evaluation.probe).correlate(Problem).exists(),
    func.substr(Problem.source, 1, len(TESTS_LINE)) != TESTS_LINE,
)
REAL_KERNEL: Final = and_(
    ~select(Evaluation.id).where(Evaluation.kernel_hash == Kernel.hash, Evaluation.probe).correlate(Kernel).exists(),
    Kernel.backend != Backend.PYTEST,
)
#: True for an attempt whose lease has run out.
OVERDUE: Final = and_(Attempt.ended_at.is_(None), Attempt.lease_until < func.now())

#: True if any evaluation has no verdict yet.
ANY_UNFINISHED: Final = select(Evaluation.id).where(OPEN).exists()
#: True if :func:`expire_queued` or :func:`expire_leases` would find anything.
ANY_EXPIRED: Final = select(Evaluation.id).where(EXPIRED_INDEXED).exists()
ANY_OVERDUE: Final = select(Attempt.id).where(OVERDUE).exists()
