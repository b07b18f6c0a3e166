"""A search's proposals without their long texts, and one of them in full."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final
from uuid import UUID

from sqlalchemy import Engine, func, select, true

from kqueue.states import SearchState
from kqueue.store import searches
from kqueue.store.models import SearchProposal, SearchRun, SearchStep
from kqueue.store.sql import columns, fetch

#: Maximum number of proposals of a run that are returned.
PROPOSALS: Final = 2000


@dataclass(frozen=True, slots=True)
class ListedRun:
    """A search or a tuning run, with the main settings of its plan.

    Attributes:
        id, name, state, created_at, ended_at: the fields of :class:`kqueue.store.searches.Run`.
        algorithm: the search algorithm, or ``tune`` for a tuning run.
        problem_label: the problem's label from the plan.
        backend: the kernels' language or library.
        proposals, passed: the number of its proposals, and of those that passed.
        speedup: the speedup of the best proposal at the end of its last step, or None.
    """

    id: UUID
    name: str
    state: SearchState
    created_at: datetime
    ended_at: datetime | None
    algorithm: str | None
    problem_label: str | None
    backend: str | None
    proposals: int
    passed: int
    speedup: float | None


@dataclass(frozen=True, slots=True)
class ProposalLine:
    """A proposal without its long texts. The fields are columns of :class:`~kqueue.store.models.SearchProposal`."""

    number: int
    step: int
    parent: int | None
    evaluation_id: UUID | None
    category: str | None
    message: str | None
    error: str | None
    runtime_ms: float | None
    speedup: float | None
    scores: dict[str, float] | None
    asked_at: datetime | None
    ended_at: datetime | None


def listed_runs(engine: Engine, *, named: str | None = None, limit: int = 50) -> list[ListedRun]:
    """Return runs, the latest first. ``named`` is a part of their names."""
    page = select(SearchRun).order_by(SearchRun.created_at.desc(), SearchRun.id).limit(limit)
    if named is not None:
        page = page.where(SearchRun.name.icontains(named, autoescape=True))
    run = page.subquery()
    best = (
        select(SearchStep.best)
        .where(SearchStep.run_id == run.c.id, SearchStep.best.is_not(None))
        .order_by(SearchStep.number.desc())
        .limit(1)
        .correlate(run)
        .scalar_subquery()
    )
    counted = (
        select(
            func.count().label("proposals"),
            func.count().filter(SearchProposal.category == "passed").label("passed"),
            func.max(SearchProposal.speedup).filter(SearchProposal.number == best).label("speedup"),
        )
        .where(SearchProposal.run_id == run.c.id)
        .lateral()
    )
    plan = {name: run.c.plan[name].astext for name in ("algorithm", "problem_label", "backend")}
    query = select(*columns(ListedRun, run, counted, **plan)).select_from(run).join(counted, true())
    return fetch(engine, ListedRun, query.order_by(run.c.created_at.desc(), run.c.id))


def proposal_lines(engine: Engine, run_id: UUID) -> list[ProposalLine]:
    """Return the first :data:`PROPOSALS` proposals of a run, in order."""
    query = select(*columns(ProposalLine, SearchProposal)).where(SearchProposal.run_id == run_id)
    return fetch(engine, ProposalLine, query.order_by(SearchProposal.number).limit(PROPOSALS))


def proposal(engine: Engine, run_id: UUID, number: int) -> searches.Proposal | None:
    """Return one proposal in full, or None if the run has no proposal of this number."""
    query = select(*columns(searches.Proposal, SearchProposal))
    proposals = fetch(
        engine, searches.Proposal, query.where(SearchProposal.run_id == run_id, SearchProposal.number == number)
    )
    return proposals[0] if proposals else None
