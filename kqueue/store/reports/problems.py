"""Stored problems."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from sqlalchemy import ColumnElement, Engine, Select, Subquery, func, literal, or_, select, true, tuple_

from kqueue.errors import UnknownProblem
from kqueue.evidence import InputTensor
from kqueue.shapes import public
from kqueue.store import sharing
from kqueue.store.engine import transaction
from kqueue.store.evaluations import REAL, REAL_PROBLEM
from kqueue.store.models import Evaluation, Problem, Verdict
from kqueue.store.sql import fetch

#: Number of a problem's evaluations in which a label is searched.
_LOOKED_AT: Final = 100
#: Number of a problem's latest evaluations in which its inputs are searched.
_RECORDED: Final = 20


@dataclass(frozen=True, slots=True)
class StoredProblem:
    """A stored problem.

    Attributes:
        problem_hash: SHA-256 of its source. The problem's name is ``sha256:`` and this hash.
        problem_label: a label from one of its evaluations, or None.
        bytes: size of its source.
        created_at: its first submission, UTC.
    """

    problem_hash: str
    problem_label: str | None
    bytes: int
    created_at: datetime


@dataclass(frozen=True, slots=True)
class ProblemDetail(StoredProblem):
    """A stored problem with its source, without shapes that are held out."""

    source: str


def problems(
    engine: Engine, *, problem: str | None = None, after: tuple[datetime, str] | None = None, limit: int = 100
) -> list[StoredProblem]:
    """List stored problems in pages, the latest first."""
    wanted: list[ColumnElement[bool]] = [REAL_PROBLEM]
    if problem is not None:
        labelled = select(Evaluation.problem_hash).where(Evaluation.problem_label == problem)
        wanted.append(or_(Problem.hash.startswith(problem, autoescape=True), Problem.hash.in_(labelled)))
    if after is not None:
        wanted.append(tuple_(Problem.created_at, Problem.hash) < tuple_(*map(literal, after)))
    order = (Problem.created_at.desc(), Problem.hash.desc())
    page = select(Problem).where(*wanted).order_by(*order).limit(limit).subquery()
    return fetch(engine, StoredProblem, _labelled(page).order_by(page.c.created_at.desc(), page.c.hash.desc()))


def problem(engine: Engine, problem_hash: str) -> ProblemDetail:
    """Return a stored or shared problem with its source."""
    one = select(Problem).where(Problem.hash == problem_hash).subquery()
    stored = fetch(engine, ProblemDetail, _labelled(one).add_columns(one.c.source))
    if stored:
        return replace(stored[0], source=public(stored[0].source))
    for one in sharing.listing(engine, problem_hash=problem_hash):
        return ProblemDetail(problem_hash, one.label, len(one.source.encode()), one.created_at, one.source)
    raise UnknownProblem([problem_hash])


def inputs_of(engine: Engine, problem_hash: str) -> list[InputTensor]:
    """Return the tensors of one call of a problem, from the latest evaluations that recorded them."""
    latest = (
        select(Evaluation.id)
        .where(Evaluation.problem_hash == problem_hash, REAL)
        .order_by(Evaluation.submitted_at.desc())
        .limit(_RECORDED)
    )
    evidence: Any = Verdict.evidence
    query = select(evidence["inputs"]).where(Verdict.evaluation_id.in_(latest), evidence.has_key("inputs")).limit(1)
    with transaction(engine) as connection:
        return [InputTensor.model_validate(one) for one in connection.scalar(query) or ()]


def _labelled(few: Subquery) -> Select[*tuple[Any, ...]]:
    """Return the query for problems with one label from the first evaluations that are found."""
    its = (Evaluation.problem_hash == few.c.hash, Evaluation.owner == few.c.owner)
    given = select(Evaluation.problem_label).where(*its).limit(_LOOKED_AT).correlate(few).subquery()
    label = select(func.max(given.c.problem_label).label("problem_label")).lateral()
    size = func.octet_length(few.c.source).label("bytes")
    return select(few.c.hash.label("problem_hash"), label.c.problem_label, size, few.c.created_at).join(label, true())
