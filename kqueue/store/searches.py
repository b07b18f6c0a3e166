"""Searches: their runs, steps and proposals."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID, uuid4

from sqlalchemy import ColumnElement, Engine, Text, cast, func, insert, select, text, update
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from kqueue.errors import InvalidRequest
from kqueue.states import SearchState
from kqueue.store import clean
from kqueue.store.engine import transaction, translate
from kqueue.store.models import SearchProposal, SearchRun, SearchStep
from kqueue.store.sql import read

#: Minimum number of characters of an id that identify a run.
_SHORTEST_ID: Final = 8


@dataclass(frozen=True, slots=True)
class Run:
    """A search. ``plan`` is the requested search."""

    id: UUID
    name: str
    plan: dict[str, Any]
    state: SearchState
    created_at: datetime
    ended_at: datetime | None


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a search run. The fields are the columns of :class:`~kqueue.store.models.SearchStep`."""

    number: int
    digest: str | None
    summary: str | None
    best: int | None
    test: dict[str, Any] | None
    started_at: datetime
    ended_at: datetime | None


@dataclass(frozen=True, slots=True)
class Proposal:
    """A proposal. The fields are the columns of :class:`~kqueue.store.models.SearchProposal`."""

    number: int
    step: int
    parent: int | None
    prompt: str | None
    answer: str | None
    kernel: str | None
    error: str | None
    evaluation_id: UUID | None
    category: str | None
    message: str | None
    runtime_ms: float | None
    speedup: float | None
    scores: dict[str, float] | None
    feedback: str | None
    asked_at: datetime | None
    ended_at: datetime | None


def _columns(kind: type[Any], of: type[Any]) -> list[ColumnElement[Any]]:
    return [getattr(of, name) for name in kind.__dataclass_fields__]


_RUN: Final = _columns(Run, SearchRun)
_STEP: Final = _columns(Step, SearchStep)
_PROPOSAL: Final = _columns(Proposal, SearchProposal)

#: Query that returns True if a session holds the lock of a visible run. Two columns contain the halves of its key.
_HELD: Final = text("""
    SELECT EXISTS (SELECT FROM search_runs WHERE id = :run) AND EXISTS (
        SELECT FROM pg_locks
        WHERE locktype = 'advisory' AND granted AND objsubid = 1
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND (classid::bigint << 32) | objid::bigint = :key
    )
""")


def create(engine: Engine, name: str, plan: Mapping[str, Any]) -> Run:
    """Record a new run."""
    values = {"id": uuid4(), "name": name, "plan": clean.json(plan)}
    try:
        with transaction(engine) as connection:
            return read(Run, connection.execute(insert(SearchRun).values(values).returning(*_RUN)))[0]
    except IntegrityError:
        raise InvalidRequest(
            f"--run-name: {name!r} is another search: resume it with `kqueue search resume`, or choose another name"
        ) from None


def find(engine: Engine, which: str) -> Run:
    """Return the run with this name or id. The first eight characters of the id suffice."""
    named: ColumnElement[bool] = SearchRun.name == which
    if re.fullmatch(rf"[0-9a-f-]{{{_SHORTEST_ID},36}}", which):
        named |= cast(SearchRun.id, Text).startswith(which)
    with transaction(engine) as connection:
        runs = read(Run, connection.execute(select(*_RUN).where(named)))
    exact = [run for run in runs if run.name == which] or runs
    if len(exact) != 1:
        raise InvalidRequest(
            f"{'several searches have' if exact else 'no search has'} the name or id {which!r}: see "
            "`kqueue search list`"
        )
    return exact[0]


def listing(engine: Engine, limit: int) -> list[Run]:
    """Return the latest runs, the latest first."""
    with transaction(engine) as connection:
        return read(Run, connection.execute(select(*_RUN).order_by(SearchRun.created_at.desc()).limit(limit)))


def steps(engine: Engine, run_id: UUID) -> list[Step]:
    """Return a run's steps in order."""
    with transaction(engine) as connection:
        query = select(*_STEP).where(SearchStep.run_id == run_id).order_by(SearchStep.number)
        return read(Step, connection.execute(query))


def proposals(engine: Engine, run_id: UUID) -> list[Proposal]:
    """Return a run's proposals in order."""
    with transaction(engine) as connection:
        query = select(*_PROPOSAL).where(SearchProposal.run_id == run_id).order_by(SearchProposal.number)
        return read(Proposal, connection.execute(query))


def begin_step(
    engine: Engine, run_id: UUID, number: int, planned: Sequence[Mapping[str, Any]], digest: str | None
) -> tuple[Step, list[Proposal]]:
    """Record a step with its planned proposals in one transaction.

    ``planned`` has the columns of each, with ``number`` and ``parent``, and ``digest`` the text for the step's
    summariser.
    """
    with transaction(engine) as connection:
        values = clean.json({"number": number, "digest": digest})
        inserted = connection.execute(insert(SearchStep).values(run_id=run_id, **values).returning(*_STEP))
        step = read(Step, inserted)[0]
        rows = [{"run_id": run_id, "step": number, **clean.json(one)} for one in planned]
        inserted = connection.execute(insert(SearchProposal).values(rows).returning(*_PROPOSAL))
        return step, sorted(read(Proposal, inserted), key=lambda one: one.number)


def update_step(engine: Engine, run_id: UUID, number: int, *, ended: bool = False, **columns: Any) -> Step:
    """Update columns of a step. ``ended`` records its end too."""
    where = (SearchStep.run_id == run_id, SearchStep.number == number)
    values = clean.json(columns) | ({"ended_at": func.now()} if ended else {})
    with transaction(engine) as connection:
        return read(Step, connection.execute(update(SearchStep).where(*where).values(values).returning(*_STEP)))[0]


def asked(engine: Engine, run_id: UUID, number: int, *, prompt: str, answer: str, kernel: str) -> Proposal:
    """Record a proposer's answer."""
    columns = {"prompt": prompt, "answer": answer, "kernel": kernel}
    return _update(engine, run_id, number, clean.json(columns) | {"asked_at": func.now()})


def ended(engine: Engine, run_id: UUID, number: int, *, evaluation_id: UUID | None = None, **columns: Any) -> Proposal:
    """Record the result of a proposal."""
    return _update(
        engine, run_id, number, clean.json(columns) | {"evaluation_id": evaluation_id, "ended_at": func.now()}
    )


def _update(engine: Engine, run_id: UUID, number: int, values: Mapping[str, Any]) -> Proposal:
    where = (SearchProposal.run_id == run_id, SearchProposal.number == number)
    with transaction(engine) as connection:
        changed = update(SearchProposal).where(*where).values(values).returning(*_PROPOSAL)
        return read(Proposal, connection.execute(changed))[0]


def set_state(engine: Engine, run_id: UUID, state: SearchState, plan: Mapping[str, Any] | None = None) -> None:
    """Record a run's state, and its changed plan. Only the holder of the run can call this (:func:`alone`)."""
    at = None if state is SearchState.RUNNING else func.now()
    values = {"state": state, "ended_at": at} | ({} if plan is None else {"plan": clean.json(plan)})
    with transaction(engine) as connection:
        connection.execute(update(SearchRun).where(SearchRun.id == run_id).values(values))


@contextmanager
def alone(engine: Engine, run_id: UUID) -> Generator[None]:
    """Hold a run exclusively, so that no other process searches in it. It is released even if the process dies."""
    with translate(), engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        # The connection is closed at the end instead of being returned to the pool, which also ends the lock.
        connection.detach()
        if not connection.scalar(text("SELECT pg_try_advisory_lock(:key)"), {"key": _key(run_id)}):
            raise InvalidRequest(
                f"another process runs the search {run_id}: watch it with `kqueue search show --watch`"
            )
        try:
            yield
        finally:
            # Without this, the lock would end only when the server detects that the connection is closed.
            with suppress(SQLAlchemyError):
                connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": _key(run_id)})


def held(engine: Engine, run_id: UUID) -> bool:
    """Return True while a process holds the run (:func:`alone`).

    The list of locks answers this, because trying the lock could make a process that wants the run fail.
    """
    with transaction(engine) as connection:
        return bool(connection.scalar(_HELD, {"run": run_id, "key": _key(run_id)}))


def _key(run_id: UUID) -> int:
    return int.from_bytes(run_id.bytes[:8], signed=True)
