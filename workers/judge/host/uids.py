"""Uids for candidates, each used by one slot of the host at a time.

When a candidate ends, every process of its uid is killed. Two fleets on one host, or a fleet and a test, must
therefore never share a uid. The holder of a uid locks a file and keeps it open, so the uid is free again when the
holder ends for any reason.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

#: Distance from a candidate's uid to the uid of its builder, which compiles.
BUILDER_OFFSET: Final = 1024
#: Distances from a candidate's uid to the uids of its reference and of a reference under ``torch.compile``. No
#: candidate may touch the process that answers for it, or the one that its time is compared with.
REFERENCE_OFFSET: Final = 2048
COMPILED_OFFSET: Final = 3072
#: Distance from a candidate's uid to the uid of the process that kills the candidate's leftovers.
KILLER_OFFSET: Final = 4096


@dataclass(frozen=True, slots=True)
class HeldUid:
    """A uid that this process may give to a slot. It is free again when the process ends or releases it."""

    uid: int
    descriptor: int

    def release(self) -> None:
        """Free the uid."""
        os.close(self.descriptor)


def hold(first: int) -> HeldUid:
    """Hold the first free uid from ``first`` on.

    Raises:
        OSError: none of the next :data:`BUILDER_OFFSET` is free, or the locks' directory is another user's.
    """
    directory = Path(tempfile.gettempdir(), "kqueue-uids")
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise PermissionError(f"{directory} belongs to another user: remove it")
    for uid in range(first, first + BUILDER_OFFSET):
        descriptor = os.open(directory / str(uid), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        return HeldUid(uid, descriptor)
    raise OSError(f"no uid from {first} on is free")
