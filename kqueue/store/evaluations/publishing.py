"""The record of the messages in Redis."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, cast
from uuid import UUID

from pydantic import ValidationError
from sqlalchemy import Engine, Row, and_, case, func, or_, select, update

from kqueue import passes, shapes
from kqueue.backends import PYTEST
from kqueue.contract import TREE_LINE, Settings, build_of
from kqueue.message import Message
from kqueue.store.engine import transaction
from kqueue.store.evaluations.conditions import EARLY, ITS_KERNEL, ITS_PROBLEM, QUEUED
from kqueue.store.models import Evaluation, Kernel, Problem
from kqueue.store.sql import any_uuid

_SEVERAL: Final = or_(
    *map(Problem.source.contains, (shapes.NAME, passes.NAME)), Problem.source.startswith(TREE_LINE.rstrip())
)
#: Query with one row for each message, which :func:`to_message` reads.
MESSAGES: Final = (
    select(
        Evaluation.id,
        Evaluation.owner,
        Evaluation.problem_hash,
        Evaluation.kernel_hash,
        Evaluation.problem_label,
        Evaluation.kernel_label,
        Evaluation.lane,
        Evaluation.settings,
        Kernel.backend,
        # Only a few problems name several shapes or a tree, or ask for gradients. Only their sources are read here.
        case((and_(Kernel.backend != PYTEST, _SEVERAL), Problem.source)).label("source"),
    )
    .join_from(Evaluation, Kernel, ITS_KERNEL)
    .join(Problem, ITS_PROBLEM)
)


def to_message(row: Row[*tuple[Any, ...]]) -> Message:
    """Return the message in a row of :data:`MESSAGES`."""
    problem = row.problem_label or row.problem_hash[:12]
    kernel = row.kernel_label or row.kernel_hash[:12]
    # A producer's login can have written anything there. The claim ends what cannot be read.
    settings = row.settings if isinstance(row.settings, dict) else {}
    return Message(
        evaluation_id=row.id,
        lane=row.lane,
        deadlines_s=_total_s(settings) * _judgements(row.source or "", settings),
        label=" ".join(
            f"owner={row.owner} problem={problem} kernel={kernel} backend={row.backend} lane={row.lane}".split()
        ),
    )


def _judgements(problem: str, settings: Mapping[str, Any]) -> int:
    """Return the maximum number of judgements of a problem: of its shapes, their passes, and of further sizes.

    A build of the problem's tree counts as one.
    """
    policies = settings.get("policies")
    is_further = isinstance(policies, dict) and cast("dict[str, Any]", policies).get("shapes", "allow") != "allow"
    further = shapes.FURTHER * is_further + bool(build_of(problem))
    return passes.count(problem, backward=bool(settings.get("backward"))) + further


def _total_s(settings: Mapping[str, Any]) -> float:
    """Return the sum of the deadlines in a row's settings, possibly written by another version, or else the default."""
    fields = {name: settings[name] for name in ("deadlines", "examine") if name in settings}
    try:
        return Settings.model_validate(fields, extra="ignore").total_s
    except ValidationError:
        return Settings().total_s


def published(engine: Engine) -> dict[str, set[UUID]]:
    """Return the queued evaluations whose messages should be in Redis, by lane."""
    by_lane: dict[str, set[UUID]] = {}
    with transaction(engine) as connection:
        for identity, lane in connection.execute(
            select(Evaluation.id, Evaluation.lane).where(QUEUED, Evaluation.published_at.is_not(None))
        ):
            by_lane.setdefault(lane, set()).add(identity)
    return by_lane


def publish(engine: Engine, ids: Collection[UUID]) -> list[Message]:
    """Record that messages are in Redis now, and return those that the caller must therefore send.

    Evaluations that have a message, or whose rows another transaction has locked, are skipped. So only one of several
    concurrent callers sends a message.
    """
    free = (
        select(Evaluation.id)
        .where(Evaluation.id == any_uuid(ids), QUEUED, Evaluation.published_at.is_(None))
        .with_for_update(skip_locked=True)
    )
    with transaction(engine) as connection:
        taken = connection.scalars(
            update(Evaluation).where(Evaluation.id.in_(free)).values(published_at=func.now()).returning(Evaluation.id)
        ).all()
        rows = {row.id: row for row in connection.execute(MESSAGES.where(Evaluation.id == any_uuid(taken)))}
    return [to_message(rows[identity]) for identity in ids if identity in rows]


def unpublish(engine: Engine, ids: Collection[UUID]) -> int:
    """Record that messages are not in Redis, so that they are sent again. Return the number of changed evaluations."""
    free = (
        select(Evaluation.id)
        .where(Evaluation.id == any_uuid(ids), QUEUED, Evaluation.published_at.is_not(None))
        .with_for_update(skip_locked=True)
    )
    with transaction(engine) as connection:
        return connection.execute(update(Evaluation).where(Evaluation.id.in_(free)).values(published_at=None)).rowcount


def make_due(engine: Engine, *, most: int) -> int:
    """Make up to ``most`` evaluations due that would wait until a clock that was set back has caught up."""
    free = select(Evaluation.id).where(EARLY).limit(most).with_for_update(skip_locked=True)
    changed = update(Evaluation).where(Evaluation.id.in_(free)).values(available_at=func.now())
    with transaction(engine) as connection:
        return connection.execute(changed).rowcount
