"""A place: where one evaluation at a time is judged, and what it may use there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

#: What is done about processes of others that compute on the GPU while a kernel is to be timed: wait for them to stop,
#: refuse to time it, or time it and say so.
Sharing = Literal["wait", "refuse", "label"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A place on a device.

    Attributes:
        name: short and unique on the host: ``gpu0-1`` is the second place on the first GPU, ``cpu-0`` the first on the
            CPU.
        number: counts all places of the host from 0.
        device: a GPU's UUID, or ``cpu``.
        siblings: places on the same device, this one included. Each may take its share of the GPU's memory.
        scratch: a directory of this place's own; others may traverse its parent.
        lock: held while the device is used alone, for checks and timing; the device's places share it.
        uid: the candidates' uid where the judge runs as root, else None. A reference's and a builder's follow from it
            (:mod:`workers.judge.host.uids`).
        gpu_shared: what is done about strangers at work on the GPU.
        keeps_references: True to keep the reference of an evaluation for the next one of the same problem.
    """

    name: str
    number: int
    device: str
    siblings: int
    scratch: Path
    lock: Path
    uid: int | None
    gpu_shared: Sharing = "wait"
    keeps_references: bool = True

    @property
    def on_gpu(self) -> bool:
        """True if the place is on a GPU."""
        return self.device != "cpu"
