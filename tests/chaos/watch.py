"""Samples the resources of a fleet's long-lived processes, and finds orphans."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kqueue.local.process import running
from tests.chaos.family import Family, born, descriptors, living, name, own_memory, words
from tests.waiting import below
from workers.judge.host import linux

_EVERY_S: Final = 1.0
#: Seconds from a process's first work to its first sample. It opens connections and fills caches first.
_GROWN_UP_S: Final = 20.0
#: The same for a service, because each worker opens another connection with its first evaluation.
_SETTLED_S: Final = 60.0
#: Number of samples from which a process is judged.
_SEEN: Final = 20
#: Seconds for which a process must survive its parents to be an orphan.
_ORPHAN_S: Final = 15.0
_SERVICES: Final = ("Postgres", "Valkey")
#: Number of samples at either end of a life. The maximum of the first ones is compared with the minimum of the last
#: ones, to exclude the work in progress.
_SAMPLES: Final = 5
#: Number of last samples of a judge. It holds more while it judges, up to 110 MiB on a CPU, and one evaluation takes
#: seconds.
_OF_A_JUDGE: Final = 15
#: Growth that is no leak: Celery reconnects, and Python's allocator rounds.
_MORE_DESCRIPTORS: Final = 4
_MORE_BYTES: Final = 16 << 20
#: Descriptors of a fork server for a process that it keeps, and the sockets among them. A mapping holds one too.
_OF_A_KEPT: Final = (6, 3)
#: Targets of which it can hold one descriptor per sealed process, depending on the host and the lane: its file system,
#: its memory.
_ONE_OF_EACH: Final = (r"/|/.+/[0-9a-f]{32}", r"/proc/\d+/mem")


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of one process, or of all processes of a service together."""

    at: float
    descriptors: int
    sockets: int
    own_bytes: int


@dataclass(frozen=True, slots=True)
class Life:
    """The first and last samples of a process."""

    role: str
    seconds: float
    descriptors: tuple[int, int]
    sockets: tuple[int, int]
    own_bytes: tuple[int, int]

    def leaks(self) -> list[str]:
        """Return a line for each resource that leaked."""
        found = [
            f"{self.role}: {what} rose from {first} to {last} in {self.seconds:.0f} s"
            for what, (first, last) in (("descriptors", self.descriptors), ("sockets", self.sockets))
            if last > first + _MORE_DESCRIPTORS
        ]
        first, last = self.own_bytes
        if last > first + max(_MORE_BYTES, first // 5):
            found.append(f"{self.role}: memory rose from {first >> 20} to {last >> 20} MiB in {self.seconds:.0f} s")
        return found


class Watch(threading.Thread):
    """Samples a fleet every second. The calling process becomes the subreaper of its orphans."""

    def __init__(self, family: Family, gpus: Sequence[int]) -> None:
        """Take the fleet and the NVML numbers of the GPUs to sample. Sampling begins with :meth:`start`."""
        super().__init__(name="watch", daemon=True)
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
        self._family = family
        self._told = threading.Event()
        self._samples: dict[tuple[str, int, int], list[Sample]] = defaultdict(list)
        #: Time at which each process, by its pid and start time, was first seen at work.
        self._at_work: dict[tuple[int, int], float] = {}
        self._strangers: dict[int, float] = {}
        self._orphans: dict[int, str] = {}
        self._nvml = _nvml(gpus) if gpus else None
        #: Errors of failed samples, because unsampled processes are not proven.
        self.faults: list[str] = []
        #: Used bytes of the GPUs together, by seconds since 1970.
        self.gpu_bytes: list[tuple[float, int]] = []

    def run(self) -> None:
        """Sample until :meth:`stop`."""
        while not self._told.wait(_EVERY_S):
            try:
                self._look()
            except Exception as error:  # noqa: BLE001
                self.faults.append(f"a look at the fleet failed: {error!r}")

    def stop(self) -> None:
        """Stop sampling."""
        self._told.set()
        self.join()

    def gpu_used(self) -> int | None:
        """Return the used bytes of the GPUs, or None if none is watched."""
        if self._nvml is None:
            return None
        library, handles = self._nvml
        return sum(int(library.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles)

    def lives(self) -> list[Life]:
        """Return the life of each process with enough samples, and of the services across their restarts."""
        found: list[Life] = []
        for (role, _, _), samples in self._samples.items():
            if len(samples) < _SEEN:
                continue
            # A killed worker is away for long on a busy host, and so are its connections to services.
            first = samples[: max(_SEEN, len(samples) // 2) if role in _SERVICES else _SAMPLES]
            last = samples[-(_OF_A_JUDGE if role == "judge" else _SAMPLES) :]
            found.append(
                Life(
                    role,
                    last[-1].at - first[0].at,
                    (max(s.descriptors for s in first), min(s.descriptors for s in last)),
                    (max(s.sockets for s in first), min(s.sockets for s in last)),
                    (max(s.own_bytes for s in first), min(s.own_bytes for s in last)),
                )
            )
        return sorted(found, key=lambda life: (life.role, -life.seconds))

    def orphans(self, grace_s: float = _ORPHAN_S) -> list[str]:
        """Return the processes that outlived their parents for this long. Call it after the fleet has exited."""
        deadline = time.monotonic() + grace_s
        while (left := self._inherited()) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in left:
            self._orphans[pid] = f"{pid} {name(pid)}: {' '.join(words(pid))[:100]}"
        return list(self._orphans.values())

    def _look(self) -> None:
        family, now = self._family, time.time()
        for pid, role in self._lasting().items():
            start = born(pid)
            held, sockets = _count(targets := descriptors(pid))
            if start is None or not held:
                continue
            if role == "fork server":
                held, sockets = _without_sealed(pid, targets)
            since = self._at_work.setdefault((pid, start), now)
            if now - since > _GROWN_UP_S:
                self._samples[role, pid, start].append(Sample(now, held, sockets, own_memory(pid)))
        for role, pid in zip(_SERVICES, (family.postgres(), family.valkey()), strict=True):
            if pid and (start := born(pid)) and now - self._at_work.setdefault((pid, start), now) > _SETTLED_S:
                held, sockets = _count(descriptors(pid))
                own = sum(own_memory(one) for one in (pid, *below(pid)))
                # The samples of a service continue across its restarts, because its data and its leaks do too.
                self._samples[role, 0, 0].append(Sample(now, held, sockets, own))
        if (used := self.gpu_used()) is not None:
            self.gpu_bytes.append((now, used))
        for pid in self._inherited():
            since = self._strangers.setdefault(pid, now)
            if now - since > _ORPHAN_S:
                self._orphans[pid] = f"{pid} {name(pid)}: {' '.join(words(pid))[:100]}"

    def _lasting(self) -> dict[int, str]:
        """Return the processes that serve more than one evaluation, with their roles."""
        family = self._family
        found = {family.up: "kqueue up"}
        if supervisor := family.supervisor():
            found[supervisor] = "supervisor"
        for worker in family.workers():
            # Imports take long on a busy machine. With its first child it is nearly ready.
            if family.task_processes(worker):
                served = {family.forkserver(worker): "fork server", family.judge_supervisor(worker): "judge supervisor"}
                found |= {worker: "worker"} | {pid: role for pid, role in served.items() if pid}
                found |= dict.fromkeys(family.judges(worker), "judge")
        return found

    def _inherited(self) -> list[int]:
        """Return living children that this process did not start, and reap dead ones."""
        return living({*linux.children(os.getpid())} - {self._family.up})


def _count(targets: list[str]) -> tuple[int, int]:
    """Count the descriptors and the sockets among them."""
    return len(targets), sum(target.startswith("socket:") for target in targets)


def _without_sealed(forkserver: int, targets: list[str]) -> tuple[int, int]:
    """Count like :func:`_count` without those for sealed processes, of which a bounded number is kept."""
    held, sockets = _count(targets)
    sealed = [child for child in linux.children(forkserver) if running(child)]
    kept = sum(name(child) in ("kq-reference", "kq-candidate") for child in sealed)
    held, sockets = held - _OF_A_KEPT[0] * kept, sockets - _OF_A_KEPT[1] * kept
    for kind in _ONE_OF_EACH:
        held -= min(sum(re.fullmatch(kind, target) is not None for target in targets), len(sealed))
    return held, sockets


def _nvml(gpus: Sequence[int]) -> tuple[Any, list[Any]]:
    import pynvml

    pynvml.nvmlInit()
    return pynvml, [pynvml.nvmlDeviceGetHandleByIndex(gpu) for gpu in gpus]
