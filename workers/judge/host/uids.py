"""Uids for candidates, each used by one slot of the host at a time.

A candidate's uid is killed as a whole when it ends, so that two fleets on one host, or a fleet and a test,
must never share one. A uid is held by a lock on a file that the holder keeps open: it is free again when
the holder ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

#: Uids of the processes that compile lie this far above the candidates'.
BUILDER_OFFSET: Final = 1024
#: Uids of references lie this far above the candidates', and those of references under ``torch.compile``: no candidate
#: may touch the process that answers for it or that its time is compared with.
REFERENCE_OFFSET: Final = 2048
COMPILED_OFFSET: Final = 3072
#: Uids that only ever kill what a candidate left lie this far above the candidate's.
KILLER_OFFSET: Final = 4096


@dataclass(frozen=True, slots=True)
class HeldUid:
    """A uid that is this process's to give to a slot; free again when the process ends or lets it go."""

    uid: int
    descriptor: int

    def release(self) -> None:
        """Let others have it."""
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
