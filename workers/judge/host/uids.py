"""Uids for candidates, each used by one slot of the host at a time.

When a candidate ends, every process of its uid is killed. So two fleets on one host, or a fleet and a test, must never
share a uid. The holder of a uid locks a file and keeps it open, so the uid is free again when the holder ends for any
reason.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

#: Maximum number of slots on a host, which is also the distance between the uids of two roles of one slot.
_MOST_SLOTS: Final = 128
#: Distances from a candidate's uid to the uids of the slot's other sealed processes. With separate uids, no candidate
#: can access its reference or the compiled baseline, and no reference can access another.
BUILDER_OFFSET: Final = 1 * _MOST_SLOTS
COMPILED_OFFSET: Final = 2 * _MOST_SLOTS
REFERENCE_OFFSETS: Final = tuple(n * _MOST_SLOTS for n in range(3, 13))
#: The same for the builder of a tree that the problem names, which can run at the same time as the kernel's.
PROBLEM_BUILDER_OFFSET: Final = 13 * _MOST_SLOTS
#: Parent directories for locks, of which the first writable one is used. The last is for containers that are otherwise
#: read-only.
PARENTS: Final = ("/run", "/tmp", "/run/kqueue")  # noqa: S108 -- the directory in it belongs to one user, or is refused
#: Distance from any of these uids to the uid of the process that kills its leftovers.
KILLER_OFFSET: Final = 2048


def all_of(uid: int) -> list[int]:
    """Return the uids of all sealed processes of a slot, for the uid of its candidates."""
    offsets = (0, BUILDER_OFFSET, COMPILED_OFFSET, PROBLEM_BUILDER_OFFSET, *REFERENCE_OFFSETS)
    return [uid + offset for offset in offsets]


@dataclass(frozen=True, slots=True)
class HeldUid:
    """A uid that this process can assign to a slot. It is free again when the process ends or releases it."""

    uid: int
    descriptor: int

    def release(self) -> None:
        """Free the uid."""
        os.close(self.descriptor)


def hold(first: int) -> HeldUid:
    """Hold the first free uid from ``first`` on. Raise OSError if none of the next 128 is free."""
    directory = _directory()
    for uid in range(first, first + _MOST_SLOTS):
        descriptor = os.open(directory / str(uid), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        return HeldUid(uid, descriptor)
    raise OSError(f"no uid from {first} on is free")


def _directory() -> Path:
    """Return the directory of locks. All fleets of a host share it, because it does not depend on ``TMPDIR``."""
    for parent in PARENTS:
        directory = Path(parent, "kqueue-uids")
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
            if directory.stat().st_uid == os.getuid():
                return directory
        except OSError:  # for example a read-only file system
            continue
    raise PermissionError(
        f"the folder kqueue-uids in {' or '.join(PARENTS)} cannot be created or belongs to another user. Remove it"
    )
