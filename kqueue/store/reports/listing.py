"""Lists of evaluations."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Final, Unpack
from uuid import UUID

from sqlalchemy import ColumnElement, Engine, func, literal, or_, select, true, tuple_
from sqlalchemy.orm import InstrumentedAttribute

from kqueue.contract import HASH
from kqueue.filters import Filters
from kqueue.states import Trials
from kqueue.store.engine import transaction
from kqueue.store.evaluations import ITS_KERNEL, OPEN, QUEUED, REAL, no_trial
from kqueue.store.models import Attempt, Environment, Evaluation, Kernel, Verdict
from kqueue.store.reports.row import Row, select_of, view
from kqueue.store.sql import any_text, fetch


@view(
    "evaluation_id owner state batch problem_label problem_hash kernel_label kernel_hash backend lane priority producer"
    " attempts submitted_at category blame compiled correctness message runtime_ms baseline_ms speedup speedup_low"
    " speedup_high device finished_at reused_from"
)
class Listed(Row):
    """One line of a list of evaluations. Durations are in milliseconds, and other times in UTC.

    The fields from ``category`` on come from the verdict. They are None for an evaluation without one.
    """

    attempts: int


#: Query for the fields of :class:`Listed`.
LISTED: Final = (
    select(*select_of(Listed, Evaluation, Kernel, Verdict, Environment))
    .join(Kernel, ITS_KERNEL)
    .outerjoin(Verdict, Verdict.evaluation_id == Evaluation.id)
    .outerjoin(Attempt, Attempt.id == Verdict.attempt_id)
    .outerjoin(Environment, Environment.hash == func.coalesce(Verdict.environment_hash, Attempt.environment_hash))
)
#: Type of a text column.
_Text = ColumnElement[Any] | InstrumentedAttribute[Any]
#: Condition on the time of the verdict, which lets its index give the order.
_FINISHED: Final = Verdict.finished_at.is_not(None)


def results(
    engine: Engine,
    *,
    since: datetime | None = None,
    after: tuple[datetime, UUID] | None = None,
    limit: int = 100,
    **filters: Unpack[Filters],
) -> list[Listed]:
    """Return finished evaluations, the latest verdict first. They follow ``finished_at`` and id of ``after``."""
    return _listed(engine, Verdict.finished_at, [_FINISHED, *conditions(filters)], since, after, limit)


def listing(
    engine: Engine,
    *,
    since: Annotated[datetime | None, "Earliest time of submission, UTC by default."] = None,
    after: tuple[datetime, UUID] | None = None,
    limit: int = 100,
    **filters: Unpack[Filters],
) -> list[Listed]:
    """List evaluations in pages, the latest submission first."""
    return _listed(engine, Evaluation.submitted_at, conditions(filters), since, after, limit)


def finished_in(
    engine: Engine, batch: str, *, since: datetime | None, after: tuple[datetime, UUID] | None, limit: int
) -> list[Listed]:
    """Return a batch's finished evaluations in the order of their ends. They follow the end and id of ``after``."""
    mine = [Evaluation.batch == batch, _FINISHED]
    return _listed(engine, Verdict.finished_at, mine, since, after, limit, latest_first=False)


def _listed(
    engine: Engine,
    at: InstrumentedAttribute[datetime],
    wanted: Sequence[ColumnElement[bool]],
    since: datetime | None,
    after: tuple[datetime, UUID] | None,
    limit: int,
    *,
    latest_first: bool = True,
) -> list[Listed]:
    """Return evaluations in the order of a time and of their ids."""
    query, place = LISTED.where(*wanted), tuple_(at, Evaluation.id)
    if since is not None:
        query = query.where(at >= since)
    if after is not None:
        bound = tuple_(*map(literal, after))
        query = query.where(place < bound if latest_first else place > bound)
    order = (at.desc(), Evaluation.id.desc()) if latest_first else (at, Evaluation.id)
    return fetch(engine, Listed, query.order_by(*order).limit(limit))


def queued(engine: Engine, *, most: int = 10_000, **filters: Unpack[Filters]) -> int:
    """Return the number of queued evaluations, at most ``most``."""
    each = select(Evaluation.id).join(Kernel, ITS_KERNEL).outerjoin(Verdict, Verdict.evaluation_id == Evaluation.id)
    counted = each.where(QUEUED, *conditions(filters)).limit(most).subquery()
    with transaction(engine) as connection:
        return connection.scalars(select(func.count()).select_from(counted)).one()


#: Minimum number of digits that are read as a hash rather than as a label.
_HASH_DIGITS: Final = 12


def unfinished(engine: Engine, *, before: datetime | None = None, **filters: Unpack[Filters]) -> list[UUID]:
    """Return the evaluations without a verdict that were submitted before a time, the oldest first.

    A filter needs at least 12 digits of a problem's or kernel's hash.
    """
    wanted = [OPEN, *conditions({"trials": Trials.WITH, **filters})]
    if before is not None:
        wanted.append(Evaluation.submitted_at < before)
    if (problem := filters.get("problem")) is not None and len(problem) < _HASH_DIGITS:
        wanted.append(Evaluation.problem_label == problem)  # a label such as `1` must not match hashes
    if (kernel := filters.get("kernel")) is not None and len(kernel) < _HASH_DIGITS:
        wanted.append(Evaluation.kernel_label.icontains(kernel, autoescape=True))
    each = select(Evaluation.id).join(Kernel, ITS_KERNEL).outerjoin(Verdict, Verdict.evaluation_id == Evaluation.id)
    query = each.where(*wanted)
    with transaction(engine) as connection:
        return list(connection.scalars(query.order_by(Evaluation.submitted_at, Evaluation.id)))


def conditions(filters: Filters) -> list[ColumnElement[bool]]:
    """Return the SQL conditions of a list's filters."""
    real = no_trial(Evaluation.batch)
    of = {Trials.WITH: true(), Trials.ONLY: ~real, None: real}[filters.get("trials")]
    batch, producer, parts = filters.get("batch"), filters.get("producer"), bool(filters.get("parts"))
    wanted: list[ColumnElement[bool]] = [REAL, of if batch is None else true()]
    exact = [Evaluation.state, Verdict.category, Verdict.blame, Kernel.backend, Evaluation.lane, Evaluation.priority]
    wanted += [one == value for one in exact if (value := filters.get(one.key)) is not None]
    if batch is not None:
        wanted.append(Evaluation.batch == (batch if isinstance(batch, str) else any_text(batch)))
    if producer is not None:
        begins = Evaluation.producer.startswith(producer, autoescape=True)
        wanted.append(begins if parts else Evaluation.producer == producer)
    if (problem := filters.get("problem")) is not None:
        wanted.append(_is_named(problem, Evaluation.problem_label, Evaluation.problem_hash, partly=parts))
    if (kernel := filters.get("kernel")) is not None:
        wanted.append(_is_named(kernel, Evaluation.kernel_label, Evaluation.kernel_hash, partly=True))
    return wanted


def _is_named(name: str, label: _Text, digest: _Text, *, partly: bool = False) -> ColumnElement[bool]:
    """Return the condition that a source has this label, or this as a part of it, or a hash with this prefix."""
    if re.fullmatch(HASH, name):
        return digest == name  # the index on hashes answers this, and no label looks like a hash
    same = label.icontains(name, autoescape=True) if partly else label == name
    return or_(same, digest.startswith(name, autoescape=True))
