"""The Celery message that makes a worker execute an evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID


@dataclass(frozen=True, slots=True)
class Message:
    """The message for one evaluation.

    Attributes:
        evaluation_id: the only field that a worker acts on. It is also the id of the Celery task.
        lane: the lane whose queue the message is sent to, never ``auto``.
        deadlines_s: sum of the evaluation's own deadlines in seconds. Celery's hard limit is higher.
        label: one line for people, never a source.
    """

    evaluation_id: UUID
    lane: str
    deadlines_s: float
    label: str
