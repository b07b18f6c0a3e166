"""The files of one sealed process, which the fork server creates, measures and removes."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from workers.judge.host import linux
from workers.judge.sandbox import mounts, seal, shelf
from workers.judge.sandbox.seal import Profile, Role

#: Minimum seconds between two measurements of a directory.
_WATCH: Final = 0.5
#: Minimum time between two measurements, in multiples of the duration of one.
_WATCH_SHARE: Final = 20


class Files:
    """The files of a sealed process, in a private file system if the host allows one, else in a measured directory.

    Attributes:
        bytes: size of the files at the last measurement.
        mount: a descriptor of the file system, or None.
    """

    def __init__(self, profile: Profile, covers: mounts.Covers | None) -> None:
        """Create the process's directories, which are empty and owned by the process's uid.

        Args:
            covers: the shared directories that the private file system hides, or None to use a directory.

        Raises:
            OSError: the host has no space for them.
        """
        self.bytes = 0
        self.mount: int | None = None
        self._profile = profile
        self._look_at = time.monotonic() + _WATCH
        owner = (os.geteuid(), os.getegid()) if profile.uid is None else (profile.uid, profile.uid)
        Path(profile.scratch).mkdir(mode=0o700)
        try:
            if covers is not None:
                # The file system is in memory, so the limit of memory applies too.
                self.mount = covers.make(min(profile.scratch_bytes, profile.host_memory_bytes), *owner)
            else:
                os.chown(profile.scratch, *owner)
            for path in seal.private_directories(str(self.root)).values():
                Path(path).mkdir(mode=0o700)
                os.chown(path, *owner, follow_symlinks=False)
            if self._has_shelf:
                shelf.make(Path(profile.built or ""))
        except OSError:
            if self.mount is not None:
                os.close(self.mount)
            raise

    @property
    def root(self) -> Path:
        """The directory through which the fork server accesses the files."""
        return Path(self._profile.scratch if self.mount is None else f"/proc/self/fd/{self.mount}")

    @property
    def _has_shelf(self) -> bool:
        return self._profile.built is not None and self._profile.role is not Role.BUILDER

    def memory_bytes(self) -> int:
        """Return how many bytes of host memory the files take."""
        if self.mount is None:
            return 0
        self._measure(self.mount)
        return self.bytes

    def overfull(self, pids: Iterable[int]) -> bool:
        """Return whether the files exceed their limit. A directory is measured only at intervals.

        ``pids`` are the processes that can hold unlinked files open.
        """
        if self.mount is not None:
            status = self._measure(self.mount)
            return status.f_bfree == 0 or status.f_ffree == 0
        begun = time.monotonic()
        if begun < self._look_at:
            return False
        count = self.weigh(pids)
        duration = time.monotonic() - begun
        self._look_at = begun + duration + max(_WATCH, _WATCH_SHARE * duration)
        return count > mounts.FILES or self.bytes > self._profile.scratch_bytes

    def weigh(self, pids: Iterable[int]) -> int:
        """Measure the files' size and return their number."""
        if self.mount is not None:
            status = self._measure(self.mount)
            return status.f_files - status.f_ffree
        count, size = _usage(self._profile.scratch)
        self.bytes = size + linux.unlinked_bytes(pids, self._profile.scratch)
        return count

    def _measure(self, mount: int) -> os.statvfs_result:
        status = os.fstatvfs(mount)
        self.bytes = (status.f_blocks - status.f_bfree) * status.f_frsize
        return status

    def release(self) -> list[Path]:
        """Close the file system after the process's end. Return the directories that the caller must remove."""
        left: list[Path] = []
        if self._has_shelf:
            try:
                Path(self._profile.built or "").rmdir()  # most kernels have no library
            except OSError:
                left.append(Path(self._profile.built or ""))
        if self.mount is None:
            return [*left, Path(self._profile.scratch)]
        os.close(self.mount)
        with contextlib.suppress(OSError):
            Path(self._profile.scratch).rmdir()
        return left


def _usage(directory: str) -> tuple[int, int]:
    """Return the number and the total size in bytes of the files and directories below a directory."""
    # Counting stops just above the limit. An unreadable directory also counts as above the limit: its owner removed the
    # permission, or its path is too long.
    count, size, todo = 0, 0, [directory]
    while todo and count <= mounts.FILES:
        try:
            with os.scandir(todo.pop()) as entries:
                for entry in itertools.islice(entries, mounts.FILES + 1 - count):
                    count += 1
                    with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            todo.append(entry.path)
        except FileNotFoundError:
            continue
        except OSError:
            return mounts.FILES + 1, size
    return count, size
