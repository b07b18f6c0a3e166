"""This host: places for tests on its GPUs, each in turn, and the locks that a fleet here takes to time on them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kqueue.config import load
from workers.judge.gpu.devices import choose, devices
from workers.judge.host import scratch
from workers.testing import sanitizer
from workers.testing.groups import Group
from workers.testing.job import Job


@dataclass(frozen=True, slots=True)
class Place:
    """Where one process of tests runs at a time.

    Attributes:
        gpu: the UUID of its GPU; None where this host shows none.
        lock: the lock of its device.
    """

    gpu: str | None
    lock: Path


class Here:
    """This host, which runs tests."""

    def __init__(self, slots: int | None, *, cwd: Path, timeout_s: float, sanitizing: bool) -> None:
        """Look for places, and for compute-sanitizer if it is asked for.

        Args:
            slots: the most processes at once; by default one a GPU, or half of the CPUs where there is none.
            cwd: the working directory of tests.
            timeout_s: most seconds for a test; infinite for no limit.
            sanitizing: whether tests are to be run under compute-sanitizer.

        Raises:
            ConfigError: KQUEUE_GPUS names a GPU that is not there, or KQUEUE_SCRATCH is another user's; or there is no
                compute-sanitizer.
        """
        self._sanitizer = sanitizer.command() if sanitizing else []
        self._cwd = cwd
        self._timeout_s = timeout_s
        self._count = 0
        self._at: dict[Job, Place] = {}
        found = _places(slots)
        self._free = deque(found)
        gpus = len({place.gpu for place in found if place.gpu is not None})
        where = "no GPU in sight" if not gpus else "1 GPU" if gpus == 1 else f"{gpus} GPUs"
        self.words = f"{len(found)} at once, {where}"

    def open(self, order: dict[str, Any], folder: Path) -> None:
        """Get ready; see :class:`~workers.testing.controller.Host`."""
        self._order, self._folder = order, folder

    def has_room(self) -> bool:
        """Return whether a process can begin now."""
        return bool(self._free)

    def start(self, group: Group, *, sanitized: bool) -> Job:
        """Start a process for a group's tests."""
        self._count += 1
        place = self._free.popleft()
        job = Job(
            group,
            self._order,
            gpu=place.gpu,
            lock=place.lock,
            folder=self._folder / f"kqueue-{self._count}",
            cwd=self._cwd,
            timeout_s=self._timeout_s * (sanitizer.SLOWDOWN if sanitized else 1),
            sanitizer=self._sanitizer if sanitized else (),
        )
        self._at[job] = place
        return job

    def over(self, job: Job) -> None:
        """Take a process's place back."""
        self._free.append(self._at.pop(job))

    def close(self) -> None:
        """Let go of all."""


def _places(slots: int | None) -> Sequence[Place]:
    config = load()
    root = config.scratch.absolute()
    scratch.prepare(root)
    gpus = [gpu.uuid for gpu in choose(config.gpus, devices(), os.environ.get("CUDA_VISIBLE_DEVICES"))]
    count = slots or len(gpus) or max(1, len(os.sched_getaffinity(0)) // 2)
    on = [Place(uuid, scratch.device_lock(root, uuid)) for uuid in gpus] or [
        Place(None, scratch.device_lock(root, "cpu"))
    ]
    return [on[number % len(on)] for number in range(count)]
