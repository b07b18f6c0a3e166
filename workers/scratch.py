"""The directories and uids of a fleet's slots, which are exclusive among the fleets of the host."""

from __future__ import annotations

import contextlib
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Final
from uuid import uuid4

from workers.judge.host import linux, scratch, uids
from workers.slot import Slot

#: Prefix of directories that wait to be removed.
_TRASH: Final = "trash-"


class Scratch:
    """The allocator of slots' private directories and uids. It removes old directories in the background."""

    def __init__(self, root: Path) -> None:
        """Configure the scratch below the setting ``scratch`` without creating anything."""
        self._root = root.absolute()
        #: Descriptors whose locks reserve the fleet's directory and uids.
        self._held: list[int] = []
        self._removals: list[subprocess.Popen[bytes]] = []

    def assign(self, slots: list[Slot]) -> list[Slot]:
        """Create the shared directories, which other users can only traverse. Return the slots with scratch and uid.

        Raises:
            ConfigError: another user owns the directories.
        """
        scratch.prepare(self._root)
        directory, descriptor = scratch.reserve(self._root, "fleet")
        self._held.append(descriptor)
        self._removals += [linux.start_removal(old) for old in directory.glob(_TRASH + "*")]
        assigned: list[Slot] = []
        for slot in slots:
            uid = None
            if slot.uid is not None:
                held = uids.hold(slot.uid)
                self._held.append(held.descriptor)
                uid = held.uid
            assigned.append(replace(slot, scratch=directory / slot.name, uid=uid))
        return assigned

    def renew(self, directory: Path) -> None:
        """Create a slot's empty directory for a new worker. Start removing the old one, without waiting."""
        with contextlib.suppress(FileNotFoundError):
            self._removals.append(linux.start_removal(directory.rename(directory.with_name(_TRASH + uuid4().hex))))
        directory.mkdir(mode=0o711, parents=True)

    def reap(self) -> None:
        """Reap the processes that have finished removing directories."""
        self._removals = [removal for removal in self._removals if removal.poll() is None]

    def pids(self) -> set[int]:
        """Return the processes that remove directories."""
        return {removal.pid for removal in self._removals}

    def release(self) -> None:
        """Release the directory and the uids to other fleets."""
        for descriptor in self._held:
            os.close(descriptor)
        self._held.clear()
