"""The files of one sealed process, as the fork server sees them."""

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

#: The least time between looks at files in a directory, in seconds, and how many times as long as one look takes.
_WATCH: Final = 0.5
_WATCH_SHARE: Final = 20


class Files:
    """They lie in a file system of the process's own, where the host allows one; else in a directory, and are weighed.

    Attributes:
        bytes: how many bytes they took when they were last looked at.
        mount: a descriptor of the file system, or None.
    """

    def __init__(self, profile: Profile, covers: mounts.Covers | None) -> None:
        """Make the process's directories, empty, and its own. Nobody else has been in them.

        Args:
            profile: whose they are, and what they may take.
            covers: what the file system covers; None for a directory.

        Raises:
            OSError: the host has no room for them.
        """
        self.bytes = 0
        self.mount: int | None = None
        self._profile = profile
        self._look_at = time.monotonic() + _WATCH
        owner = (os.geteuid(), os.getegid()) if profile.uid is None else (profile.uid, profile.uid)
        Path(profile.scratch).mkdir(mode=0o700)
        try:
            if covers is not None:
                # They count as memory, and so never take more than that.
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
        """The directory in which the fork server finds them."""
        return Path(self._profile.scratch if self.mount is None else f"/proc/self/fd/{self.mount}")

    @property
    def _has_shelf(self) -> bool:
        return self._profile.built is not None and self._profile.role is not Role.BUILDER

    def memory_bytes(self) -> int:
        """Return how many bytes of the host's memory they take."""
        if self.mount is None:
            return 0
        self._measure(self.mount)
        return self.bytes

    def overfull(self, pids: Iterable[int]) -> bool:
        """Return whether they fill what they may take, as far as it is time to look.

        Args:
            pids: the processes that may hold files without a name.
        """
        if self.mount is not None:
            held = self._measure(self.mount)
            return held.f_bfree == 0 or held.f_ffree == 0
        begun = time.monotonic()
        if begun < self._look_at:
            return False
        count = self.weigh(pids)
        took = time.monotonic() - begun
        self._look_at = begun + took + max(_WATCH, _WATCH_SHARE * took)
        return count > mounts.FILES or self.bytes > self._profile.scratch_bytes

    def weigh(self, pids: Iterable[int]) -> int:
        """Note how many bytes they take; return how many there are."""
        if self.mount is not None:
            held = self._measure(self.mount)
            return held.f_files - held.f_ffree
        count, taken = _below(self._profile.scratch)
        self.bytes = taken + linux.unlinked_bytes(pids, self._profile.scratch)
        return count

    def _measure(self, mount: int) -> os.statvfs_result:
        held = os.fstatvfs(mount)
        self.bytes = (held.f_blocks - held.f_bfree) * held.f_frsize
        return held

    def release(self) -> list[Path]:
        """Let go of them when the process has ended. Return the directories that are left to be removed."""
        left = [Path(self._profile.built or "")] if self._has_shelf else []
        if self.mount is None:
            return [*left, Path(self._profile.scratch)]
        os.close(self.mount)
        with contextlib.suppress(OSError):
            Path(self._profile.scratch).rmdir()
        return left


def _below(directory: str) -> tuple[int, int]:
    """Return how many files and directories there are below one, and the bytes that they take.

    It counts to just above the most. So many are taken to be in a directory that cannot be read: its owner closed it,
    or its path is too long.
    """
    count, taken, todo = 0, 0, [directory]
    while todo and count <= mounts.FILES:
        try:
            with os.scandir(todo.pop()) as entries:
                for entry in itertools.islice(entries, mounts.FILES + 1 - count):
                    count += 1
                    with contextlib.suppress(FileNotFoundError):  # it is gone again
                        taken += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            todo.append(entry.path)
        except FileNotFoundError:
            continue
        except OSError:
            return mounts.FILES + 1, taken
    return count, taken
