"""A private file system of fixed size for everything that a sealed process writes.

It is a tmpfs that the fork server creates detached. Only the sealed process attaches it, in its own mount namespace: as
its private directory, and over the directories that all processes of a host share. The fork server keeps a descriptor
to access the files. They are deleted when the process has ended and the descriptor is closed.

Its pages count as memory of the process that writes them first.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from workers.judge.host import linux

#: Directories in which programs share files.
_SHARED: Final = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108
#: Directories of the system, which are not covered.
_SYSTEM: Final = ("/dev", "/etc", "/proc", "/sys")
#: Maximum number of files and directories in a file system, because each takes kernel memory. A compiler's cache has
#: hundreds, and a tree (:mod:`kqueue.trees`) up to 20,000.
FILES: Final = 40_000


@dataclass(frozen=True, slots=True)
class Covers:
    """The directories of this host that a private file system covers, and the paths in them that stay accessible."""

    directories: tuple[str, ...]
    kept: tuple[str, ...]

    def make(self, size: int, uid: int, gid: int) -> int:
        """Create a file system of ``size`` bytes and return a descriptor of its root. Raise OSError if that fails."""
        mount = linux.tmpfs(size=size, nr_inodes=FILES, mode="0700", uid=uid, gid=gid)
        for directory in self.directories:
            os.mkdir(_folder(directory), dir_fd=mount)
            os.chmod(_folder(directory), 0o1777, dir_fd=mount)  # noqa: S103 -- the mode of the covered directories
        return mount

    def attach(self, mount: int, scratch: str, more: Sequence[str] = ()) -> None:
        """Attach a file system of :meth:`make` in a new mount namespace of the calling process.

        The empty directory ``scratch`` becomes its root. The paths ``more`` stay accessible too.
        """
        linux.unshare(linux.CLONE_NEWNS)
        # Mounts here do not appear on the host, but unmounts on the host take effect here.
        linux.mount(None, "/", None, linux.MS_REC | linux.MS_SLAVE)
        linux.attach(mount, scratch)
        # Parent directories of the kept paths can be traversed, but not listed or written.
        before = os.umask(0o666)
        # The covers hide these paths, but open descriptors still give access to them.
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
    """Return the covers for this host, given the paths that sealed processes can read."""
    return _covers(dict.fromkeys(os.path.realpath(path) for path in _SHARED if Path(path).is_dir()), readable)


def find_all(readable: Sequence[str]) -> Covers:
    """Return covers that hide every directory in which another process could listen on a socket.

    Landlock does not prevent a connection to a socket with a path. Only the system's directories, which contain no
    sockets, and the readable paths stay visible.
    """
    top = [str(path) for path in sorted(Path("/").iterdir()) if path.is_dir() and not path.is_symlink()]
    return _covers([path for path in [*top, "/dev/shm"] if path not in {*_SYSTEM, *readable}], readable)  # noqa: S108


def _covers(directories: Iterable[str], readable: Sequence[str]) -> Covers:
    directories = tuple(directories)
    kept: list[str] = []
    for path in sorted(_within(readable, directories)):
        # A directory includes everything below it.
        if Path(path).is_dir() and not _is_below(path, kept):
            kept.append(path)
    return Covers(directories, tuple(kept))


def _within(paths: Iterable[str], directories: Iterable[str]) -> list[str]:
    """Return the paths below one of the directories, and the targets there of links among the paths."""
    resolved = dict.fromkeys(name for path in paths for name in (path, os.path.realpath(path)))
    return [path for path in resolved if _is_below(path, directories)]


def _is_below(path: str, directories: Iterable[str]) -> bool:
    return any(path.startswith(f"{directory}/") for directory in directories)


def _folder(directory: str) -> str:
    """Return the name of the folder that covers a shared directory."""
    return f"over{directory.replace('/', '-')}"


def _open(path: str) -> int:
    return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
