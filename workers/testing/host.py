"""Slots for tests on this host's GPUs, with the GPUs' locks, which a local fleet holds while it times kernels."""

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
class TestSlot:
    """A slot for one process of tests at a time.

    Attributes:
        gpu: the UUID of its GPU, or None on a host without visible GPUs.
        lock: the lock of its device.
    """

    gpu: str | None
    lock: Path


class Here:
    """The :class:`~workers.testing.controller.Host` that runs tests on this host."""

    def __init__(self, slots: int | None, *, cwd: Path, timeout_s: float, sanitizing: bool) -> None:
        """Find the slots, and compute-sanitizer if it is requested.

        Args:
            slots: the limit on concurrent processes. By default one for each GPU, or half of the CPUs without GPUs.
            cwd: the tests' working directory.
            timeout_s: limit on one test in seconds, infinite for no limit.
            sanitizing: whether failed tests are run again under compute-sanitizer.

        Raises:
            ConfigError: KQUEUE_GPUS names a missing GPU, another user owns KQUEUE_SCRATCH, or compute-sanitizer is
                missing.
        """
        self._sanitizer = sanitizer.command() if sanitizing else []
        self._cwd = cwd
        self._timeout_s = timeout_s
        self._count = 0
        self._used: dict[Job, TestSlot] = {}
        all_slots = _test_slots(slots)
        self._free = deque(all_slots)
        gpus = len({slot.gpu for slot in all_slots if slot.gpu is not None})
        where = "no visible GPU" if not gpus else "1 GPU" if gpus == 1 else f"{gpus} GPUs"
        self.words = f"{len(all_slots)} at once, {where}"

    def open(self, order: dict[str, Any], folder: Path) -> None:
        """Store the order's shared fields and the folder."""
        self._order, self._folder = order, folder

    def has_room(self) -> bool:
        """Return whether a slot is free."""
        return bool(self._free)

    def start(self, group: Group, *, sanitized: bool) -> Job:
        """Start a process for a group's tests."""
        self._count += 1
        slot = self._free.popleft()
        job = Job(
            group,
            self._order,
            gpu=slot.gpu,
            lock=slot.lock,
            folder=self._folder / f"kqueue-{self._count}",
            cwd=self._cwd,
            timeout_s=self._timeout_s * (sanitizer.SLOWDOWN if sanitized else 1),
            sanitizer=self._sanitizer if sanitized else (),
        )
        self._used[job] = slot
        return job

    def over(self, job: Job) -> None:
        """Free the slot of a process that has ended."""
        self._free.append(self._used.pop(job))

    def close(self) -> None:
        """Do nothing: the controller closes all jobs."""


def _test_slots(slots: int | None) -> Sequence[TestSlot]:
    config = load()
    root = config.scratch.absolute()
    scratch.prepare(root)
    gpus = [gpu.uuid for gpu in choose(config.gpus, devices(), os.environ.get("CUDA_VISIBLE_DEVICES"))]
    count = slots or len(gpus) or max(1, len(os.sched_getaffinity(0)) // 2)
    on_devices = [TestSlot(uuid, scratch.device_lock(root, uuid)) for uuid in gpus] or [
        TestSlot(None, scratch.device_lock(root, "cpu"))
    ]
    return [on_devices[number % len(on_devices)] for number in range(count)]
