"""CPU time that an evaluation used: the judge's own, and its sealed processes'."""

from __future__ import annotations

import resource
from typing import Final

from workers.judge.forkserver.process import SealedProcess
from workers.judge.sandbox.seal import Role

_JUDGE: Final = "judge"


class CpuTime:
    """CPU time of an evaluation since this object was created."""

    def __init__(self) -> None:
        """Start with the judge's own time."""
        self._begun = _own()
        self._processes: list[tuple[Role, SealedProcess]] = []

    def count(self, role: Role, process: SealedProcess) -> None:
        """Count a process of this role."""
        self._processes.append((role, process))

    def seconds(self) -> dict[str, float]:
        """Return the seconds so far of the ``judge``, and by role of the processes that have ended or were kept."""
        used = {_JUDGE: _own() - self._begun}
        for role, process in self._processes:
            used[role] = used.get(role, 0.0) + process.cpu_s
        return {name: round(seconds, 6) for name, seconds in used.items()}


def _own() -> float:
    """Return the CPU time of this process and its ended children in seconds."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
