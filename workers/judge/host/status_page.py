"""The flight recorder: what a judge does, and what it was doing when it died.

It is one page of shared memory, which the worker's parent has before it forks. Each clerk has a entry there for its
open attempt. The judge, of which a worker has one at a time, has a entry for its position, and names the attempt with
it. So a clerk or a judge that is dying changes nothing of what the page tells of another evaluation. The parent reads
the page after a death, and the supervisor, which made the page, while the judge works. A clerk's entry also says
whether the clerk was used up by judging, and must not see to another evaluation.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from kqueue.contract import Phase

#: The clerks that a worker has at a time: one with a task, and a spare one.
TASK_PROCESSES: Final = 2

_PHASES = list(Phase)
#: evaluation id, attempt number (0: none)
_ATTEMPT = struct.Struct("=16sI")
#: nonzero if the clerk was used up
_USED = struct.Struct("=i")
_ENTRY_BYTES = _ATTEMPT.size + _USED.size
#: evaluation id, attempt number, phase's index, monotonic deadline of the phase in seconds (0: none)
_POSITION = struct.Struct("=16sIid")
#: the step within the phase
_STEP = struct.Struct("=32s")
_POSITION_AT = TASK_PROCESSES * _ENTRY_BYTES
_STEP_AT = _POSITION_AT + _POSITION.size


@dataclass(frozen=True, slots=True)
class Record:
    """An open attempt, and the judge's last position in it.

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


class StatusPage:
    """A page of memory that a worker's parent shares with its children, and with its supervisor if that made it."""

    def __init__(self, descriptor: int = -1) -> None:
        """Share the page of :func:`make_page`, or make one that only children will share."""
        self._page = mmap.mmap(descriptor, mmap.PAGESIZE)
        self._used = False
        #: Where this process's entry is, if it is a clerk.
        self._entry = 0
        #: The attempt of this process: its own if it is a clerk, or the one that it judges.
        self._attempt = (bytes(16), 0)

    @property
    def used(self) -> bool:
        """True if this process is used up."""
        return self._used

    @property
    def attempt(self) -> tuple[UUID, int]:
        """This process's attempt: the evaluation's id, and the attempt's number, which is 0 if there is none."""
        return UUID(bytes=self._attempt[0]), self._attempt[1]

    def begin(self, task_process: int) -> None:
        """Record that this process is a new clerk, in the place of an earlier one.

        Args:
            task_process: its number, below :data:`TASK_PROCESSES`.
        """
        self._entry = task_process * _ENTRY_BYTES
        _USED.pack_into(self._page, self._entry + _ATTEMPT.size, 0)

    def use(self) -> None:
        """Record that this clerk is used up: its evaluation goes beyond reading."""
        self._used = True
        _USED.pack_into(self._page, self._entry + _ATTEMPT.size, 1)

    def used_up(self, task_process: int) -> bool:
        """Return True if the clerk with this number is used up."""
        return _USED.unpack_from(self._page, task_process * _ENTRY_BYTES + _ATTEMPT.size) != (0,)

    def open(self, evaluation_id: UUID, number: int) -> None:
        """Record that this clerk has claimed this attempt."""
        self._attempt = evaluation_id.bytes, number
        _ATTEMPT.pack_into(self._page, self._entry, *self._attempt)

    def close(self) -> None:
        """Clear this clerk's entry: the attempt's outcome is in the database."""
        self._attempt = (bytes(16), 0)
        _ATTEMPT.pack_into(self._page, self._entry, *self._attempt)

    def judge(self, evaluation_id: UUID, number: int) -> None:
        """Record that this process, the judge, begins with this attempt."""
        self._attempt = evaluation_id.bytes, number
        self.at("")
        _POSITION.pack_into(self._page, _POSITION_AT, *self._attempt, -1, 0.0)

    def enter(self, phase: Phase, deadline: float = 0.0) -> None:
        """Record that the judge enters a phase.

        Args:
            phase: the phase.
            deadline: when it should end, in seconds of the monotonic clock; 0 for none.
        """
        _POSITION.pack_into(self._page, _POSITION_AT, *self._attempt, _PHASES.index(phase), deadline)

    def at(self, step: str) -> None:
        """Record that the judge is at a step; an empty text if at none."""
        _STEP.pack_into(self._page, _STEP_AT, step.encode())

    def read(self) -> list[Record]:
        """Return the open attempts, each with the judge's last position in it."""
        entry = (
            _ATTEMPT.unpack_from(self._page, task_process * _ENTRY_BYTES) for task_process in range(TASK_PROCESSES)
        )
        return [self._record(*attempt) for attempt in entry if attempt[1] != 0]

    def find(self, evaluation_id: UUID) -> Record | None:
        """Return the open attempt of an evaluation; None if there is none."""
        return next((record for record in self.read() if record.evaluation_id == evaluation_id), None)

    def forget(self, record: Record) -> None:
        """Clear the entry of an attempt whose clerk has died without closing it."""
        attempt = (record.evaluation_id.bytes, record.number)
        for entry in range(0, TASK_PROCESSES * _ENTRY_BYTES, _ENTRY_BYTES):
            if _ATTEMPT.unpack_from(self._page, entry) == attempt:
                _ATTEMPT.pack_into(self._page, entry, bytes(16), 0)

    def _record(self, identity: bytes, number: int) -> Record:
        *judged, index, deadline = _POSITION.unpack_from(self._page, _POSITION_AT)
        if judged != [identity, number]:
            return Record(UUID(bytes=identity), number, phase=None, overdue=False)
        phase = _PHASES[index] if index >= 0 else None
        overdue = 0.0 < deadline <= time.monotonic()
        # Whoever reads while the judge writes may see half a name.
        [step] = _STEP.unpack_from(self._page, _STEP_AT)
        name = step.rstrip(b"\0").decode("ascii", "replace")
        return Record(UUID(bytes=identity), number, phase, overdue, name or phase)


def make_page() -> int:
    """Return a descriptor of a new page for :class:`StatusPage`, which another program may share too."""
    descriptor = os.memfd_create("kqueue-blackbox", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, mmap.PAGESIZE)
    return descriptor
