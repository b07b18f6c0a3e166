"""The flight recorder: what a judge does, and what it was doing when it died.

It is one page of shared memory, which the worker's parent has before it forks. The judge writes its position; the
parent reads it after the judge's death, and the supervisor, which made the page, while the judge works. A worker has
one judge at a time. The page also says which clerk was used up by judging, and must not see to another evaluation.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from uuid import UUID

from kqueue.contract import Phase

_PHASES = list(Phase)
#: evaluation id, attempt number, phase's index, monotonic deadline of the phase in seconds (0: none)
_LAYOUT = struct.Struct("=16sIid")
#: the step within the phase
_STEP = struct.Struct("=32s")
_RECORD_BYTES = _LAYOUT.size + _STEP.size
#: the process that was used up last; behind the record, which is cleared
_USED = struct.Struct("=i")


@dataclass(frozen=True, slots=True)
class Record:
    """The judge's last position.

    Attributes:
        evaluation_id: the evaluation that it had claimed.
        number: the attempt's number.
        phase: the phase it was in; None before the first.
        overdue: True if the phase's deadline had passed when the record was read.
        step: the step it was at, as ``evidence.durations_s`` names it, or else its phase; None before the first.
    """

    evaluation_id: UUID
    number: int
    phase: Phase | None
    overdue: bool
    step: str | None = None


class BlackBox:
    """A page of memory that a worker's parent shares with its children, and with its supervisor if that made it."""

    def __init__(self, descriptor: int = -1) -> None:
        """Share the page of :func:`make_page`, or make one that only children will share."""
        self._page = mmap.mmap(descriptor, mmap.PAGESIZE)
        self._used = False

    @property
    def used(self) -> bool:
        """True if this process is used up."""
        return self._used

    def begin(self) -> None:
        """Record that this process is new: what an earlier one with its number did says nothing of it."""
        if self.used_up(os.getpid()):
            _USED.pack_into(self._page, _RECORD_BYTES, 0)

    def use(self) -> None:
        """Record that this process is used up: its evaluation goes beyond reading."""
        self._used = True
        _USED.pack_into(self._page, _RECORD_BYTES, os.getpid())

    def used_up(self, pid: int) -> bool:
        """Return True if a process was used up, and no other one since."""
        return _USED.unpack_from(self._page, _RECORD_BYTES) == (pid,)

    def open(self, evaluation_id: UUID, number: int) -> None:
        """Record that the judge has claimed this attempt."""
        self.at("")
        _LAYOUT.pack_into(self._page, 0, evaluation_id.bytes, number, -1, 0.0)

    def enter(self, phase: Phase, deadline: float = 0.0) -> None:
        """Record that the judge enters a phase.

        Args:
            phase: the phase.
            deadline: when it should end, in seconds of the monotonic clock; 0 for none.
        """
        identity, number, _, _ = _LAYOUT.unpack_from(self._page)
        _LAYOUT.pack_into(self._page, 0, identity, number, _PHASES.index(phase), deadline)

    def at(self, step: str) -> None:
        """Record that the judge is at a step; an empty text if at none."""
        _STEP.pack_into(self._page, _LAYOUT.size, step.encode())

    def close(self) -> None:
        """Clear the page: the attempt's outcome is in the database."""
        self._page[:_RECORD_BYTES] = bytes(_RECORD_BYTES)

    def read(self) -> Record | None:
        """Return the last record; None if no attempt is open."""
        identity, number, index, deadline = _LAYOUT.unpack_from(self._page)
        if number == 0:
            return None
        overdue = 0.0 < deadline <= time.monotonic()
        phase = _PHASES[index] if index >= 0 else None
        # Whoever reads while the judge writes may see half a name.
        [step] = _STEP.unpack_from(self._page, _LAYOUT.size)
        name = step.rstrip(b"\0").decode("ascii", "replace")
        return Record(UUID(bytes=identity), number, phase, overdue, name or phase)


def make_page() -> int:
    """Return a descriptor of a new page for :class:`BlackBox`, which another program may share too."""
    descriptor = os.memfd_create("kqueue-blackbox", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, mmap.PAGESIZE)
    return descriptor
