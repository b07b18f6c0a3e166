"""The message that has a worker execute an evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID


@dataclass(frozen=True, slots=True)
class Message:
    """The message for one evaluation.

    Attributes:
        evaluation_id: the only thing that a worker acts on; also the id of the Celery task.
        lane: the name of the lane whose queue it goes to, never ``auto``.
        deadlines_s: the sum of the evaluation's own deadlines in seconds. Celery's hard limit lies above it.
        label: one line for people, never a source.
    """

    evaluation_id: UUID
    lane: str
    deadlines_s: float
    label: str
