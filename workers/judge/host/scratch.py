"""The directory in which the judges of one user store their files and share the locks of devices."""

from __future__ import annotations

import fcntl
import itertools
import os
from pathlib import Path

from kqueue.errors import ConfigError


def prepare(root: Path) -> None:
    """Create the directory and its folder of locks. Other users can only traverse the directory."""
    locks = root / "locks"
    for directory in (root, locks):
        directory.mkdir(mode=0o711, parents=True, exist_ok=True)
        if directory.is_symlink() or directory.stat().st_uid != os.geteuid():
            raise ConfigError(f"{directory} belongs to another user. Set KQUEUE_SCRATCH to a directory of your own")
    root.chmod(0o711)
    locks.chmod(0o700)


def device_lock(root: Path, device: str) -> Path:
    """Return the path of a device's lock, for a GPU's UUID or ``cpu``. Fleets and local judges of one user share it."""
    return root / "locks" / f"{device}.lock"


def reserve(root: Path, name: str) -> tuple[Path, int]:
    """Create and lock the first of the directories ``name-0``, ``name-1``, ... without a lock.

    Return it with the descriptor that holds its lock. It can have files of an earlier owner that was killed.
    """
    for number in itertools.count():
        directory = root / f"{name}-{number}"
        directory.mkdir(mode=0o711, exist_ok=True)
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:  # its owner removed it after the mkdir
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        if os.fstat(descriptor).st_nlink == 0:
            os.close(descriptor)
            continue
        return directory, descriptor
    raise AssertionError("itertools.count() does not end")
