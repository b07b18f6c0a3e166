"""What an evaluation has used of CPUs: the judge's own time, and that of its sealed processes."""

from __future__ import annotations

import resource
from typing import Final

from workers.judge.forkserver.process import SealedProcess
from workers.judge.sandbox.seal import Role

_JUDGE: Final = "judge"


class CpuTime:
    """The CPU time of an evaluation, from when this is made."""

    def __init__(self) -> None:
        """Begin with the judge's own."""
        self._begun = _own()
        self._processes: list[tuple[Role, SealedProcess]] = []

    def count(self, role: Role, process: SealedProcess) -> None:
        """Count a process in."""
        self._processes.append((role, process))

    def seconds(self) -> dict[str, float]:
        """Return the seconds so far: ``judge``, and by role those of processes that have ended or were kept."""
        found = {_JUDGE: _own() - self._begun}
        for role, process in self._processes:
            found[role] = found.get(role, 0.0) + process.cpu_s
        return {name: round(seconds, 6) for name, seconds in found.items()}


def _own() -> float:
    """Return the CPU time of this process and of its children that have ended, in seconds."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
