"""The ended attempts of an evaluation, and the suspicion against its kernel that follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Connection, Row, func, select

from kqueue.categories import Category
from kqueue.evidence import EarlierAttempt
from kqueue.states import Writer
from kqueue.store.models import Attempt, Worker

#: Number of tries that lost their worker or GPU, after which the kernel is suspected.
_SUSPECTED_AFTER: Final = 2


@dataclass(frozen=True)
class History:
    """The ended attempts of an evaluation, in order."""

    attempts: tuple[Row[*tuple[Any, ...]], ...] = ()

    @classmethod
    def read(cls, connection: Connection, evaluation_id: UUID) -> History:
        """Within the caller's transaction, read an evaluation's ended attempts."""
        return cls(
            tuple(
                connection.execute(
                    select(
                        Attempt.number,
                        Worker.name.label("worker"),
                        Worker.device,
                        Attempt.category,
                        Attempt.message,
                        Attempt.written_by,
                        Attempt.handed_back,
                        func.extract("epoch", Attempt.ended_at - Attempt.started_at).label("seconds"),
                    )
                    .join(Worker, Worker.id == Attempt.worker_id)
                    .where(Attempt.evaluation_id == evaluation_id, Attempt.ended_at.is_not(None))
                    .order_by(Attempt.number)
                )
            )
        )

    @cached_property
    def tries(self) -> int:
        """The number of attempts that count as tries, which excludes those handed back."""
        return sum(not attempt.handed_back for attempt in self.attempts)

    @cached_property
    def deaths(self) -> int:
        """The number of tries that lost their worker or GPU."""
        return sum(
            is_death(attempt.category, attempt.written_by) for attempt in self.attempts if not attempt.handed_back
        )

    @property
    def suspected(self) -> bool:
        """True if the kernel is suspected. Its next try has exclusive use of its device and is the last."""
        return is_suspected(self.deaths)

    def as_evidence(self) -> tuple[EarlierAttempt, ...]:
        """Return the attempts in the form of a verdict's evidence."""
        return tuple(
            EarlierAttempt(
                number=attempt.number,
                worker=attempt.worker,
                device=attempt.device,
                category=attempt.category,
                message=attempt.message,
                seconds=round(float(attempt.seconds), 3),
                handed_back=attempt.handed_back,
            )
            for attempt in self.attempts
        )


def is_death(category: str, written_by: str) -> bool:
    """Return True if a failed try of the fleet ended without a report of its judge, or with a failing GPU."""
    return written_by != Writer.JUDGE or category in (Category.WORKER_LOST, Category.GPU_UNHEALTHY)


def is_suspected(deaths: int) -> bool:
    """Return True if a kernel with this number of tries that lost their worker or GPU is suspected."""
    return deaths >= _SUSPECTED_AFTER
