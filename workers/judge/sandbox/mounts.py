"""A file system of a sealed process's own, of a fixed size, for all that it writes.

It is a tmpfs that the fork server makes and attaches nowhere. The process alone attaches it, in a mount namespace of
its own: as its private directory, and over the directories that all processes of a host share. The fork server keeps a
descriptor, by which it reaches the files. When the process has ended and the descriptor is closed, they are gone.

Its pages count as memory of the process that writes them first.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from workers.judge.host import linux

#: Directories in which programs leave files for others.
_SHARED: Final = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108
#: Directories of the system's own, which are not covered.
_SYSTEM: Final = ("/dev", "/etc", "/proc", "/sys")
#: The most files and directories in a file system, as few as bound what they take of the host's kernel. A compiler's
#: cache has hundreds.
FILES: Final = 20_000


@dataclass(frozen=True, slots=True)
class Covers:
    """The shared directories of this host that a file system covers.

    Attributes:
        directories: those that there are.
        kept: the paths within them that stay in reach.
    """

    directories: tuple[str, ...]
    kept: tuple[str, ...]

    def make(self, size: int, uid: int, gid: int) -> int:
        """Make a file system.

        Args:
            size: how many bytes its files may take.
            uid: whose it is.
            gid: likewise the group.

        Returns:
            a descriptor of its root.

        Raises:
            OSError: the host does not allow it.
        """
        mount = linux.tmpfs(size=size, nr_inodes=FILES, mode="0700", uid=uid, gid=gid)
        for directory in self.directories:
            os.mkdir(_folder(directory), dir_fd=mount)
            os.chmod(_folder(directory), 0o1777, dir_fd=mount)  # noqa: S103 -- as of those that they cover
        return mount

    def attach(self, mount: int, scratch: str, more: Sequence[str] = ()) -> None:
        """Attach a file system in a new mount namespace of the calling process.

        Args:
            mount: a file system from :meth:`make`.
            scratch: an empty directory, which becomes its root.
            more: further paths that stay in reach.

        Raises:
            OSError: the host does not allow it.
        """
        linux.unshare(linux.CLONE_NEWNS)
        # Nothing that is mounted here appears on the host; what is unmounted there goes here too.
        linux.mount(None, "/", None, linux.MS_REC | linux.MS_SLAVE)
        linux.attach(mount, scratch)
        # What leads to them may be traversed, and not listed or written.
        before = os.umask(0o666)
        # The covers hide these. Descriptors that were opened before still reach them.
        kept = {path: _open(path) for path in (*self.kept, *_within(more, self.directories))}
        root = _open(scratch)
        for directory in self.directories:
            linux.mount(f"/proc/self/fd/{root}/{_folder(directory)}", directory, None, linux.MS_BIND)
        for path, descriptor in (*kept.items(), *((path, root) for path in _within([scratch], self.directories))):
            Path(path).mkdir(parents=True, exist_ok=True)
            linux.mount(f"/proc/self/fd/{descriptor}", path, None, linux.MS_BIND | linux.MS_REC)
        for descriptor in (*kept.values(), root):
            os.close(descriptor)
        os.umask(before)


def find(readable: Sequence[str]) -> Covers:
    """Return what a file system covers on this host.

    Args:
        readable: the paths that sealed processes may read.
    """
    return _covers(dict.fromkeys(os.path.realpath(path) for path in _SHARED if Path(path).is_dir()), readable)


def find_all(readable: Sequence[str]) -> Covers:
    """Return what a file system covers that leaves nothing in sight where others may listen.

    Landlock does not keep a process from connecting to a socket that has a path. What stays are the system's own
    directories, which hold none, and what is readable.

    Args:
        readable: the paths that sealed processes may read.
    """
    top = [str(path) for path in sorted(Path("/").iterdir()) if path.is_dir() and not path.is_symlink()]
    return _covers([path for path in [*top, "/dev/shm"] if path not in {*_SYSTEM, *readable}], readable)  # noqa: S108


def _covers(directories: Iterable[str], readable: Sequence[str]) -> Covers:
    directories = tuple(directories)
    kept: list[str] = []
    for path in sorted(_within(readable, directories)):
        # A directory brings along what is below it.
        if Path(path).is_dir() and not _is_below(path, kept):
            kept.append(path)
    return Covers(directories, tuple(kept))


def _within(paths: Iterable[str], directories: Iterable[str]) -> list[str]:
    """Return the paths that lie below one of the directories, and what others that lead there lead to."""
    named = dict.fromkeys(name for path in paths for name in (path, os.path.realpath(path)))
    return [path for path in named if _is_below(path, directories)]


def _is_below(path: str, directories: Iterable[str]) -> bool:
    return any(path.startswith(f"{directory}/") for directory in directories)


def _folder(directory: str) -> str:
    """Return the name of the folder that covers a shared directory."""
    return f"over{directory.replace('/', '-')}"


def _open(path: str) -> int:
    return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
