"""A search's proposals without their long texts, and one of them in full."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final
from uuid import UUID

from sqlalchemy import Engine, func, select

from kqueue.states import SearchState
from kqueue.store import searches
from kqueue.store.engine import transaction
from kqueue.store.models import SearchProposal, SearchRun
from kqueue.store.sql import any_uuid, read

#: The most proposals of a run that are returned.
PROPOSALS: Final = 2000


@dataclass(frozen=True, slots=True)
class ListedRun:
    """A search or a tuning run, with what its plan says of it.

    Attributes:
        id, name, state, created_at, ended_at: as :class:`kqueue.store.searches.Run` has them.
        algorithm: how it chooses; ``tune`` for a tuning run.
        problem_label: as given.
        backend: what the kernels are written in.
        proposals, passed: the numbers of its proposals, and of those that passed.
        speedup: the largest; None where none is known.
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
    """A proposal without its long texts; the fields are those of :class:`~kqueue.store.models.SearchProposal`."""

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
    """Return runs, the latest first.

    Args:
        engine: the database.
        named: a part of their names.
        limit: at most so many.
    """
    query = select(SearchRun).order_by(SearchRun.created_at.desc(), SearchRun.id).limit(limit)
    if named is not None:
        query = query.where(SearchRun.name.icontains(named, autoescape=True))
    page = query.subquery()
    counted = select(
        SearchProposal.run_id,
        func.count().label("proposals"),
        func.count().filter(SearchProposal.category == "passed").label("passed"),
        func.max(SearchProposal.speedup).label("speedup"),
    ).group_by(SearchProposal.run_id)
    own = ("id", "name", "state", "created_at", "ended_at")
    with transaction(engine) as connection:
        rows = connection.execute(
            select(
                *(page.c[name] for name in own),
                *(page.c.plan[name].astext.label(name) for name in ("algorithm", "problem_label", "backend")),
            ).order_by(page.c.created_at.desc(), page.c.id)
        ).all()
        ids = [row.id for row in rows]
        numbers = {row.run_id: row for row in connection.execute(counted.where(SearchProposal.run_id == any_uuid(ids)))}
    found: list[ListedRun] = []
    for row in rows:
        of = numbers.get(row.id)
        told = {"proposals": 0, "passed": 0, "speedup": None}
        if of is not None:
            told = {"proposals": of.proposals, "passed": of.passed, "speedup": of.speedup}
        found += read(ListedRun, [row], **told)
    return found


def proposal_lines(engine: Engine, run_id: UUID) -> list[ProposalLine]:
    """Return the first :data:`PROPOSALS` proposals of a run, in order."""
    columns = [getattr(SearchProposal, name) for name in ProposalLine.__dataclass_fields__]
    query = select(*columns).where(SearchProposal.run_id == run_id).order_by(SearchProposal.number).limit(PROPOSALS)
    with transaction(engine) as connection:
        return read(ProposalLine, connection.execute(query))


def proposal(engine: Engine, run_id: UUID, number: int) -> searches.Proposal | None:
    """Return one proposal in full; None if the run has no such one."""
    columns = [getattr(SearchProposal, name) for name in searches.Proposal.__dataclass_fields__]
    query = select(*columns).where(SearchProposal.run_id == run_id, SearchProposal.number == number)
    with transaction(engine) as connection:
        found = read(searches.Proposal, connection.execute(query))
    return found[0] if found else None
