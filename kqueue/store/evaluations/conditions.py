"""SQL conditions on evaluations and attempts."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from sqlalchemy import ColumnElement, and_, false, func, literal_column, or_, select

from kqueue.states import EvaluationState
from kqueue.store.models import Attempt, Evaluation

#: States are written out, as a prepared statement whose states are parameters cannot use the partial indexes.
QUEUED: Final = Evaluation.state == literal_column(f"'{EvaluationState.QUEUED}'")
#: True for an evaluation that has no verdict yet.
OPEN: Final = Evaluation.state != literal_column(f"'{EvaluationState.DONE}'")
#: True for an evaluation that no worker began in the time that its producer allowed. Coalesced, so that ``NOT`` works.
EXPIRED: Final = and_(QUEUED, Evaluation.attempts == 0, func.coalesce(Evaluation.expires_at <= func.now(), false()))
#: The same, with a second comparison that can use the index.
EXPIRED_INDEXED: Final = and_(EXPIRED, Evaluation.expires_at <= func.now())
#: True for an attempt whose lease has run out.
OVERDUE: Final = and_(Attempt.ended_at.is_(None), Attempt.lease_until < func.now())
#: A producer sends its messages itself. A sweeper leaves them to it for so many seconds after the commit.
PUBLISHING_S: Final = 10.0


def unpublished(patience_s: float) -> ColumnElement[bool]:
    """Return the condition of a due evaluation without a message that was submitted ``patience_s`` seconds ago."""
    return and_(
        QUEUED,
        Evaluation.available_at <= func.now(),
        Evaluation.published_at.is_(None),
        or_(Evaluation.attempts > 0, Evaluation.submitted_at <= func.now() - timedelta(seconds=patience_s)),
    )


#: True if any evaluation has no verdict yet.
ANY_UNFINISHED: Final = select(Evaluation.id).where(OPEN).exists()
#: True if :func:`due_for_publishing`, :func:`expire_queued` or :func:`expire_leases` would find anything.
ANY_UNPUBLISHED: Final = select(Evaluation.id).where(unpublished(PUBLISHING_S)).exists()
ANY_EXPIRED: Final = select(Evaluation.id).where(EXPIRED_INDEXED).exists()
ANY_OVERDUE: Final = select(Attempt.id).where(OVERDUE).exists()
