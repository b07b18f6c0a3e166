"""Keeping track of the messages in Redis."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Engine, Row, func, select, update

from kqueue.contract import Deadlines
from kqueue.message import Message
from kqueue.store.engine import transaction
from kqueue.store.evaluations.conditions import PUBLISHING_S, QUEUED, unpublished
from kqueue.store.models import Evaluation, Kernel
from kqueue.store.sql import any_uuid

#: One row for each message, as :func:`to_message` reads it.
MESSAGES: Final = select(
    Evaluation.id,
    Evaluation.problem_hash,
    Evaluation.kernel_hash,
    Evaluation.problem_label,
    Evaluation.kernel_label,
    Evaluation.lane,
    Evaluation.settings,
    Kernel.backend,
).join(Kernel, Kernel.hash == Evaluation.kernel_hash)


def to_message(row: Row[*tuple[Any, ...]]) -> Message:
    """Return the message in a row of :data:`MESSAGES`."""
    problem = row.problem_label or row.problem_hash[:12]
    kernel = row.kernel_label or row.kernel_hash[:12]
    return Message(
        evaluation_id=row.id,
        lane=row.lane,
        deadlines_s=Deadlines.model_validate(row.settings["deadlines"]).total_s,
        label=" ".join(f"problem={problem} kernel={kernel} backend={row.backend} lane={row.lane}".split()),
    )


def due_for_publishing(engine: Engine, *, limit: int, patience_s: float = PUBLISHING_S) -> list[Message]:
    """Return the messages that are missing in Redis, the longest waiting first.

    They are those of queued and due evaluations. Evaluations submitted less than ``patience_s`` seconds ago are left
    to their producers.
    """
    with transaction(engine) as connection:
        rows = connection.execute(
            MESSAGES.where(unpublished(patience_s)).order_by(Evaluation.available_at).limit(limit)
        ).all()
    return [to_message(row) for row in rows]


def published(engine: Engine) -> dict[str, set[UUID]]:
    """Return the queued evaluations whose messages should be in Redis, by lane."""
    found: dict[str, set[UUID]] = {}
    with transaction(engine) as connection:
        for identity, lane in connection.execute(
            select(Evaluation.id, Evaluation.lane).where(QUEUED, Evaluation.published_at.is_not(None))
        ):
            found.setdefault(lane, set()).add(identity)
    return found


def mark_published(engine: Engine, ids: Collection[UUID], *, lost: bool = False) -> None:
    """Record that the messages of ``ids`` are in Redis now. Evaluations that somebody claims meanwhile are skipped.

    Args:
        engine: the database.
        ids: the evaluations.
        lost: record instead that the messages are not in Redis, so that they are due for publishing.
    """
    free = select(Evaluation.id).where(Evaluation.id == any_uuid(ids), QUEUED).with_for_update(skip_locked=True)
    with transaction(engine) as connection:
        connection.execute(
            update(Evaluation).where(Evaluation.id.in_(free)).values(published_at=None if lost else func.now())
        )
