"""A slot: a place on a device, and the one worker process of the fleet that serves it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Final, Self
from uuid import UUID

from workers.judge.slot_config import SlotConfig

#: The supervisor tells a worker process its slot through this variable, as JSON. Holds no secret.
VARIABLE: Final = "KQUEUE_SLOT"
#: The number of the socket between a worker process and its supervisor, for the words below.
READY_VARIABLE: Final = "KQUEUE_READY"
#: Words of one byte. The worker is ready, and waits for the first of the two words that it is told; something that
#: it killed does not die; nothing such is left.
READY: Final = b"r"
STUCK: Final = b"s"
FREE: Final = b"f"
#: What it is told: take messages; take none.
GO: Final = b"g"
PAUSE: Final = b"p"
#: The number of the descriptor from which a worker process reads the fleet's settings, secrets among them.
SETTINGS_VARIABLE: Final = "KQUEUE_SETTINGS"
#: The number of the descriptor of the page from which the supervisor reads what is done
#: (:mod:`workers.judge.host.status_page`).
PAGE_VARIABLE: Final = "KQUEUE_PAGE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot(SlotConfig):
    """A place, as a worker process of the fleet must know it.

    Attributes:
        worker_id: the row of this life of the worker process in the table ``workers``.
        lanes: the lanes served, the most general first: ``["gpu", "gpu.h200"]``.
    """

    worker_id: UUID
    lanes: tuple[str, ...]

    def to_json(self) -> str:
        """Return the value of :data:`VARIABLE`."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_environment(cls) -> Self:
        """Return the slot of this process, as its supervisor wrote it."""
        known = json.loads(os.environ[VARIABLE])
        return cls.from_json(known | {"worker_id": UUID(known["worker_id"]), "lanes": tuple(known["lanes"])})
