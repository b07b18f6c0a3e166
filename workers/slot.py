"""A slot: a share of a device, served by one worker process of the fleet."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Final, Self
from uuid import UUID

from workers.judge.slot_config import SlotConfig

#: Variable with a worker process's slot as JSON, which holds no secret.
VARIABLE: Final = "KQUEUE_SLOT"
#: Variable with the descriptor of a worker process's socket to the supervisor, for the messages below.
READY_VARIABLE: Final = "KQUEUE_READY"
#: Messages of a worker, of one byte each: it is ready and waits for its first order, a process that it killed does not
#: die, or no such process is left.
READY: Final = b"r"
STUCK: Final = b"s"
FREE: Final = b"f"
#: Orders to a worker, of one byte each: take messages, or take none.
GO: Final = b"g"
PAUSE: Final = b"p"
#: Variable with the descriptor from which a worker process reads the fleet's settings, secrets included.
SETTINGS_VARIABLE: Final = "KQUEUE_SETTINGS"
#: Variable with the descriptor of the status page that the supervisor reads (:mod:`workers.judge.host.status_page`).
PAGE_VARIABLE: Final = "KQUEUE_PAGE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot(SlotConfig):
    """The slot of a fleet's worker process.

    Attributes:
        worker_id: the row of the current worker process in the table ``workers``.
        lanes: the lanes served, the most general first: ``["gpu", "gpu.h200"]``.
    """

    worker_id: UUID
    lanes: tuple[str, ...]

    def to_json(self) -> str:
        """Return the value of :data:`VARIABLE`."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_environment(cls) -> Self:
        """Return the slot of this process from the variable that the supervisor set."""
        fields = json.loads(os.environ[VARIABLE])
        return cls.from_json(fields | {"worker_id": UUID(fields["worker_id"]), "lanes": tuple(fields["lanes"])})
