"""Places for tests: a GPU each, in turn, and the lock that a fleet on this host takes to time on it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kqueue.config import load
from workers.judge.gpu.devices import choose, devices
from workers.judge.host import scratch


@dataclass(frozen=True, slots=True)
class Place:
    """Where one process of tests runs at a time.

    Attributes:
        gpu: the UUID of its GPU; None where this host shows none.
        lock: the lock of its device.
    """

    gpu: str | None
    lock: Path


def places(slots: int | None) -> Sequence[Place]:
    """Return places for so many processes at once; by default one a GPU, or half of the CPUs where there is none.

    Raises:
        ConfigError: KQUEUE_GPUS names a GPU that is not there, or KQUEUE_SCRATCH is another user's.
    """
    config = load()
    root = config.scratch.absolute()
    scratch.prepare(root)
    gpus = [gpu.uuid for gpu in choose(config.gpus, devices(), os.environ.get("CUDA_VISIBLE_DEVICES"))]
    count = slots or len(gpus) or max(1, len(os.sched_getaffinity(0)) // 2)
    on = [Place(uuid, scratch.device_lock(root, uuid)) for uuid in gpus] or [
        Place(None, scratch.device_lock(root, "cpu"))
    ]
    return [on[number % len(on)] for number in range(count)]


def words(found: Sequence[Place]) -> str:
    """Return in words how many processes there are at once, and where."""
    gpus = len({place.gpu for place in found if place.gpu is not None})
    where = "no GPU in sight" if not gpus else "1 GPU" if gpus == 1 else f"{gpus} GPUs"
    return f"{len(found)} at once, {where}"
