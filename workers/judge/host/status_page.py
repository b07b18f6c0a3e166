"""The status page: the current activity of a judge, and its last activity if it died.

It is one page of shared memory, which the worker's parent has before it forks. Each task process has an entry on it for
its open attempt. The judge, of which a worker has one at a time, has an entry for its position and for the attempt that
it judges. So the death of a task process or judge does not change the entry of another evaluation. The parent reads the
page after a death. The supervisor, which made the page, reads it while the judge works. A task process's entry also
records that judging has used up the process, so that it must not start another evaluation.
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

#: Number of task processes of a worker at a time: one with a task, and a spare one.
TASK_PROCESSES: Final = 2

_PHASES = list(Phase)
#: evaluation id, attempt number (0: none)
_ATTEMPT = struct.Struct("=16sI")
#: nonzero if the task process is used up
_USED = struct.Struct("=i")
_ENTRY_BYTES = _ATTEMPT.size + _USED.size
#: evaluation id, attempt number, phase's index, monotonic deadline of the phase in seconds (0: none)
_POSITION = struct.Struct("=16sIid")
#: step within the phase
_STEP = struct.Struct("=32s")
_POSITION_AT = TASK_PROCESSES * _ENTRY_BYTES
_STEP_AT = _POSITION_AT + _POSITION.size
_FAILURES_AT = _STEP_AT + _STEP.size


@dataclass(frozen=True, slots=True)
class Record:
    """An open attempt, and the judge's last position in it.

    Attributes:
        phase: current phase, or None before the first.
        overdue: True if the phase's deadline had passed when the record was read.
        step: current step with its name in ``evidence.durations_s``, or else the phase. None before the first.
    """

    evaluation_id: UUID
    number: int
    phase: Phase | None
    overdue: bool
    step: str | None = None


class StatusPage:
    """The status page, shared by a worker's parent with its children, and with the supervisor if that made the page."""

    def __init__(self, descriptor: int = -1) -> None:
        """Map the page of :func:`make_page`, or create one that only children share."""
        self._page = mmap.mmap(descriptor, mmap.PAGESIZE)
        #: One byte with the number of the worker's last evaluations that all failed, possibly by its own fault.
        self.failures = memoryview(self._page)[_FAILURES_AT : _FAILURES_AT + 1]
        self._used = False
        #: Offset of this process's entry, if it is a task process.
        self._entry = 0
        #: The attempt that this process has claimed as a task process, or that it judges.
        self._attempt = (bytes(16), 0)

    @property
    def used(self) -> bool:
        """Return whether this process is used up."""
        return self._used

    @property
    def attempt(self) -> tuple[UUID, int]:
        """Return the evaluation id and number of this process's attempt. The number is 0 if there is none."""
        return UUID(bytes=self._attempt[0]), self._attempt[1]

    def begin(self, task_process: int) -> None:
        """Record that this process is the task process with this number, and clear the entry of its predecessor."""
        self._entry = task_process * _ENTRY_BYTES
        _USED.pack_into(self._page, self._entry + _ATTEMPT.size, 0)

    def use(self) -> None:
        """Record that this task process is used up, because its evaluation continues after static checks."""
        self._used = True
        _USED.pack_into(self._page, self._entry + _ATTEMPT.size, 1)

    def used_up(self, task_process: int) -> bool:
        """Return whether the task process with this number is used up."""
        return _USED.unpack_from(self._page, task_process * _ENTRY_BYTES + _ATTEMPT.size) != (0,)

    def open(self, evaluation_id: UUID, number: int) -> None:
        """Record that this task process has claimed an attempt."""
        self._attempt = evaluation_id.bytes, number
        _ATTEMPT.pack_into(self._page, self._entry, *self._attempt)

    def close(self) -> None:
        """Clear this task process's attempt, whose outcome is in the database."""
        self._attempt = (bytes(16), 0)
        _ATTEMPT.pack_into(self._page, self._entry, *self._attempt)

    def judge(self, evaluation_id: UUID, number: int) -> None:
        """Record that this process, the judge, starts with an attempt."""
        self._attempt = evaluation_id.bytes, number
        self.at("")
        _POSITION.pack_into(self._page, _POSITION_AT, *self._attempt, -1, 0.0)

    def enter(self, phase: Phase, deadline: float = 0.0) -> None:
        """Record that the judge enters a phase. ``deadline`` is in seconds of the monotonic clock, or 0 for none."""
        _POSITION.pack_into(self._page, _POSITION_AT, *self._attempt, _PHASES.index(phase), deadline)

    def at(self, step: str) -> None:
        """Record the judge's step, or that there is none if the text is empty."""
        _STEP.pack_into(self._page, _STEP_AT, step.encode())

    def read(self) -> list[Record]:
        """Return the attempts that are not closed, each with the last phase and step that its judge wrote."""
        attempts = (
            _ATTEMPT.unpack_from(self._page, task_process * _ENTRY_BYTES) for task_process in range(TASK_PROCESSES)
        )
        return [self._record(*attempt) for attempt in attempts if attempt[1] != 0]

    def find(self, evaluation_id: UUID) -> Record | None:
        """Return the open attempt of an evaluation, or None."""
        return next((record for record in self.read() if record.evaluation_id == evaluation_id), None)

    def forget(self, record: Record) -> None:
        """Clear the entry of an attempt whose task process died before closing it."""
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
        # The judge can write during this read, which then returns a mix of two names.
        [step] = _STEP.unpack_from(self._page, _STEP_AT)
        name = step.rstrip(b"\0").decode("ascii", "replace")
        return Record(UUID(bytes=identity), number, phase, overdue, name or phase)


def make_page() -> int:
    """Create a page for :class:`StatusPage` that other programs can share, and return its descriptor."""
    descriptor = os.memfd_create("kqueue-status-page", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, mmap.PAGESIZE)
    return descriptor
