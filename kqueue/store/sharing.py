"""Problems that their owners share with all owners, and the leaderboards of them.

An owner that submits against a shared problem gets a copy of its source, so that nothing else of two owners is ever
shared. The copy stays if the problem is shared no longer. A producer's login of the database sees only the shared
problems of its owner (:mod:`kqueue.store.roles`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Annotated, Any, Final

from sqlalchemy import Connection, Engine, Text, bindparam, func, literal, select, text
from sqlalchemy.dialects.postgresql import JSONB, distinct_on, insert

from kqueue.contract import RULES
from kqueue.errors import InvalidRequest, UnknownProblem
from kqueue.shapes import public
from kqueue.store.engine import transaction
from kqueue.store.models import ME, Evaluation, Problem, SharedProblem
from kqueue.store.sql import any_text, columns, fetch, read

_BOARD: Final = text("SELECT * FROM kqueue_board(:hash, :most, :usual)").bindparams(bindparam("usual", RULES, JSONB))


@dataclass(frozen=True, slots=True)
class Shared:
    """A shared problem.

    Attributes:
        problem_hash: SHA-256 of its source. Submissions name it ``sha256:`` and this hash.
        label: its name, for people.
        owner: the owner that shares it.
        leaderboard: True if owners see each other's times for it.
        created_at: the time since which it is shared, UTC.
        source: its source, without shapes that are held out.
    """

    problem_hash: str
    label: str
    owner: str
    leaderboard: bool
    created_at: datetime
    source: str


@dataclass(frozen=True, slots=True)
class Entry:
    """The fastest kernel of one owner for a shared problem, in a precision on a device model. Times are in ms.

    Attributes:
        rank: its rank among the owners, from 1, by ``speedup_low``. None under other settings than the board's.
        speedup_low: lower bound of the speedup, which is lower the more programs the owner has.
        measured: the number of measurements, of which the median counts.
        settings: the settings on which a verdict's meaning depends that are not the usual ones.
    """

    rank: int | None
    owner: str
    precision: str
    device: str | None
    runtime_ms: float
    baseline_ms: float | None
    speedup: float | None
    speedup_low: float | None
    measured: int
    settings: dict[str, Any]


def share(
    engine: Engine,
    problem_hash: str,
    *,
    label: Annotated[str | None, "Its name. By default the label of its last evaluation."] = None,
    leaderboard: Annotated[bool, "Let owners see each other's times for it."] = False,
) -> Shared:
    """Share a problem that the caller's owner submitted: all owners can read it and submit kernels for it.

    If it is shared, change its label and leaderboard. A prefix of its hash is the label of a problem without one. Raise
    UnknownProblem if the owner has submitted no such problem. A copy cannot be shared again.
    """
    last_label, settings = (
        select(what)
        .where(Evaluation.problem_hash == Problem.hash, Evaluation.owner == Problem.owner)
        .order_by(Evaluation.submitted_at.desc())
        .limit(1)
        .scalar_subquery()
        for what in (Evaluation.problem_label, Evaluation.settings)
    )
    named = func.coalesce(literal(label, Text), last_label, func.substr(Problem.hash, 1, 12))
    its = select(Problem.hash, named, Problem.source, literal(leaderboard), func.coalesce(settings, literal({}, JSONB)))
    its = its.where(Problem.hash == problem_hash, Problem.owner == ME, Problem.shared_from.is_(None))
    new = insert(SharedProblem).from_select(["hash", "label", "source", "leaderboard", "settings"], its)
    kept = {"label": new.excluded.label, "leaderboard": new.excluded.leaderboard}
    with transaction(engine) as connection:
        rows = connection.execute(
            new.on_conflict_do_update(index_elements=["hash", "owner"], set_=kept).returning(*_COLUMNS)
        )
        found = [replace(one, source=public(one.source)) for one in read(Shared, rows)]
    if not found:
        raise UnknownProblem([problem_hash])
    return found[0]


def unshare(engine: Engine, problem_hash: str) -> None:
    """Stop sharing a problem. Owners that submitted for it keep a copy."""
    with transaction(engine) as connection:
        # With the right to delete, a producer's login could lock the table.
        if not connection.scalar(select(func.kqueue_unshare(problem_hash))):
            raise InvalidRequest(f"problem: sha256:{problem_hash} is not shared by this owner")


def listing(engine: Engine, *, problem_hash: str | None = None, sources: bool = True) -> list[Shared]:
    """List shared problems, with or without their sources. Submissions name them `sha256:` and their hash."""
    chosen = _COLUMNS if sources else _BRIEF
    query = select(*chosen).order_by(SharedProblem.created_at, SharedProblem.hash, SharedProblem.owner)
    if problem_hash is not None:
        query = query.where(SharedProblem.hash == problem_hash)
    return [replace(one, source=public(one.source)) for one in fetch(engine, Shared, query)]


def board(engine: Engine, problem_hash: str, *, limit: int = 100) -> list[Entry]:
    """Return the best times of each owner for a shared problem. Empty unless it is shared with a leaderboard.

    An owner has one entry for each precision and device model. It takes part if it shares the problem, or if its
    evaluations use a copy of it. Owners that submitted the same source themselves stay unknown.
    """
    with transaction(engine) as connection:
        return read(Entry, connection.execute(_BOARD, {"hash": problem_hash, "most": limit}))


def copy(connection: Connection, hashes: Collection[str]) -> set[str]:
    """Within the caller's transaction, give its owner copies of shared problems. Return the hashes of the copies."""
    first = (
        select(SharedProblem.hash, SharedProblem.source, SharedProblem.owner)
        .ext(distinct_on(SharedProblem.hash))
        .where(SharedProblem.hash == any_text(hashes), SharedProblem.owner != ME)
        .order_by(SharedProblem.hash, SharedProblem.created_at)
    )
    copies = insert(Problem).from_select(["hash", "source", "shared_from"], first).on_conflict_do_nothing()
    return set(connection.scalars(copies.returning(Problem.hash)))


_COLUMNS: Final = columns(Shared, SharedProblem, problem_hash=SharedProblem.hash)
_BRIEF: Final = columns(Shared, SharedProblem, problem_hash=SharedProblem.hash, source=literal(""))
