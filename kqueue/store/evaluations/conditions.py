"""SQL conditions on evaluations and attempts."""

from __future__ import annotations

from typing import Final

from sqlalchemy import ColumnElement, Text, and_, bindparam, false, func, literal_column, or_, select, true
from sqlalchemy.orm import InstrumentedAttribute

from kqueue.backends import PYTEST
from kqueue.contract import TESTS_LINE, TREE_LINE
from kqueue.registry import each_of
from kqueue.states import EvaluationState
from kqueue.store.models import Attempt, Evaluation, Kernel, Problem, SearchRun

#: Condition for a queued evaluation. States are literals, because a prepared statement with states as parameters cannot
#: use the partial indexes.
QUEUED: Final = Evaluation.state == literal_column(f"'{EvaluationState.QUEUED}'")
#: Condition for an evaluation without a verdict.
OPEN: Final = Evaluation.state != literal_column(f"'{EvaluationState.DONE}'")
#: Condition for an evaluation that no worker began within its queue wait. ``coalesce`` makes ``NOT`` work.
EXPIRED: Final = and_(QUEUED, Evaluation.attempts == 0, func.coalesce(Evaluation.expires_at <= func.now(), false()))
#: The same condition, with a second comparison that can use the index.
EXPIRED_INDEXED: Final = and_(EXPIRED, Evaluation.expires_at <= func.now())
#: Condition for an evaluation that a user requested. Probes belong to the fleet: no report counts or lists them,
#: and no producer pays for them.
REAL: Final = Evaluation.probe.is_(False)


def no_trial(batch: ColumnElement[str | None] | InstrumentedAttribute[str | None]) -> ColumnElement[bool]:
    """Return the condition that an evaluation of this batch is not a trial, but a kernel that a producer submitted.

    Autopsies and some features make trials. Lists, rates, exports and leaderboards leave them out.
    """
    # The features are read when a statement is executed.
    begins = bindparam(None, callable_=lambda: f"^({'|'.join(each_of('trials'))})", type_=Text())
    algorithms = bindparam(None, callable_=lambda: each_of("runs"), expanding=True)
    runs = select(SearchRun.name).where(SearchRun.plan["algorithm"].astext.in_(algorithms))
    return func.coalesce(and_(~batch.regexp_match(begins), batch.not_in(runs)), true())


#: Conditions that join an evaluation with its sources. Equal sources of two owners are two rows.
ITS_PROBLEM: Final = and_(Problem.hash == Evaluation.problem_hash, Problem.owner == Evaluation.owner)
ITS_KERNEL: Final = and_(Kernel.hash == Evaluation.kernel_hash, Kernel.owner == Evaluation.owner)


def _is_real(source: type[Problem | Kernel], its: ColumnElement[bool]) -> ColumnElement[bool]:
    """Return the condition that a source of the enclosing statement belongs to no probe, and not only to trials."""
    of = select(Evaluation.id).where(its).correlate(source)
    return and_(~of.where(Evaluation.probe).exists(), or_(of.where(no_trial(Evaluation.batch)).exists(), ~of.exists()))


#: Condition for the text of a tree, and conditions for a problem or kernel of the enclosing statement that a producer
#: submitted and that is neither a tree nor a repository's tests. Postgres reads only the beginning of a long source.
IS_TREE: Final = func.substr(Problem.source, 1, len(TREE_LINE)) == TREE_LINE
REAL_PROBLEM: Final = and_(
    _is_real(Problem, ITS_PROBLEM), func.substr(Problem.source, 1, len(TESTS_LINE)) != TESTS_LINE, ~IS_TREE
)
REAL_KERNEL: Final = and_(_is_real(Kernel, ITS_KERNEL), Kernel.backend != PYTEST)
#: A time in the future. It is a literal, so that Postgres knows how few evaluations are due later.
_LATER: Final = literal_column("now() + interval '10 s'")
_TRIED_AT: Final = select(func.max(Attempt.ended_at)).where(Attempt.evaluation_id == Evaluation.id)
#: Condition for an evaluation that is due later and was submitted or tried in the future: the database's clock was set
#: back. The first comparison can use the index.
EARLY: Final = and_(
    QUEUED,
    Evaluation.available_at > _LATER,
    func.greatest(Evaluation.submitted_at, _TRIED_AT.correlate(Evaluation).scalar_subquery()) > _LATER,
)
#: Condition for an attempt whose lease has expired.
OVERDUE: Final = and_(Attempt.ended_at.is_(None), Attempt.lease_until < func.now())

#: Condition that any evaluation has no verdict.
ANY_UNFINISHED: Final = select(Evaluation.id).where(OPEN).exists()
#: Conditions that :func:`expire_queued`, :func:`make_due` and :func:`expire_leases` would find any row.
ANY_EXPIRED: Final = select(Evaluation.id).where(EXPIRED_INDEXED).exists()
ANY_EARLY: Final = select(Evaluation.id).where(EARLY).exists()
ANY_OVERDUE: Final = select(Attempt.id).where(OVERDUE).exists()
