"""A slot: a place on a device for one evaluation, and the one worker process that serves it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Self
from uuid import UUID

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


@dataclass(frozen=True, slots=True)
class Slot:
    """What a worker process must know of its place.

    Attributes:
        worker_id: the row of this life of the worker process in the table ``workers``.
        name: short and unique on the host: ``gpu0-1`` is the second slot of the first GPU, ``cpu-0`` the
            first of the CPU.
        number: counts all slots of the host from 0; makes the candidate's uid.
        device: a GPU's UUID, or ``cpu``.
        lanes: the lanes served, the most general first: ``["gpu", "gpu.h200"]``.
        siblings: slots on the same device, this one included.
        scratch: a directory of this slot's own; its parent may be traversed by others.
        lock: held while the device is used alone, for checks and timing; shared by the device's slots.
        uid: the candidate's uid where the fleet runs as root, else None.
    """

    worker_id: UUID
    name: str
    number: int
    device: str
    lanes: tuple[str, ...]
    siblings: int
    scratch: Path
    lock: Path
    uid: int | None

    @property
    def on_gpu(self) -> bool:
        """Whether the slot is on a GPU."""
        return self.device != "cpu"

    def to_json(self) -> str:
        """The value of :data:`VARIABLE`."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_environment(cls) -> Self:
        """The slot of this process, as its supervisor wrote it."""
        known = json.loads(os.environ[VARIABLE])
        return cls(
            worker_id=UUID(known["worker_id"]),
            name=known["name"],
            number=known["number"],
            device=known["device"],
            lanes=tuple(known["lanes"]),
            siblings=known["siblings"],
            scratch=Path(known["scratch"]),
            lock=Path(known["lock"]),
            uid=known["uid"],
        )
