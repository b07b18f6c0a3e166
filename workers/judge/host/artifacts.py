"""The store of builds: what a sealed builder has made of a source, kept for later evaluations of the same source.

An entry is one file under a key: the hash of all that the build depends on (:mod:`workers.judge.host.toolchain`). Only
the judge reads and writes it, and it unpickles nothing. Each entry begins with the hash of what follows; one that does
not fit is dropped. Where the store fails it is as if it were empty: no evaluation fails for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from pydantic import BaseModel, ConfigDict

from kqueue.errors import ConfigError

#: Names of entries, and the beginning of those of files that are being written. No other file is touched.
_KEY: Final = re.compile(r"[0-9a-f]{64}")
_PART: Final = "part-"
#: An entry that takes more than this share of the store is not kept: it would push out all others.
_LARGEST_SHARE: Final = 1 / 8
#: The share of the bound that is left after pruning, so that not every new entry prunes.
_LEFT_SHARE: Final = 0.9
#: The least share of a disk that must be free: evaluations need room more than builds do.
_FREE_SHARE: Final = 0.1
#: An entry's last use is noted so exactly, in seconds.
_USE_S: Final = 3600.0
#: A part that is so old was left by a judge that was killed, in seconds.
_PART_S: Final = 3600.0
#: A location of fsspec's is looked through after every so many writes on average: listing one takes a request.
_LOOK_EVERY: Final = 16


class Library(BaseModel):
    """A library of an entry."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    #: The key under which the candidate looks for it (:func:`workers.judge.candidate.libraries.key`).
    key: str
    name: str
    size: int


class Refusal(BaseModel):
    """A compiler's final word against a source."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    message: str
    exception: str


class Header(BaseModel):
    """What an entry says of a build beside the libraries themselves.

    Attributes:
        key: the entry's.
        libraries: in the order of their contents.
        log: the end of the builder's log.
        seconds: how long the build took.
        peak_bytes: the largest private memory of the builder's process tree.
        skipped: the reason if the build stopped early.
        refusal: set if there are no libraries because a compiler refused the source.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    libraries: tuple[Library, ...] = ()
    log: str = ""
    seconds: float
    peak_bytes: int
    skipped: str = ""
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A build: what is said of it, and the contents of its libraries."""

    header: Header
    contents: tuple[bytes, ...] = ()

    def pack(self) -> bytes:
        """Return the entry as it is stored: a hash, the header and the libraries."""
        body = self.header.model_dump_json().encode() + b"\n" + b"".join(self.contents)
        return hashlib.sha256(body).hexdigest().encode() + b"\n" + body

    @classmethod
    def unpack(cls, data: bytes, key: str) -> Entry:
        """Read a stored entry.

        Raises:
            ValueError: it is damaged, or another key's.
        """
        digest, _, body = data.partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != digest:
            raise ValueError("the content does not have the hash that is written before it")
        written, _, rest = body.partition(b"\n")
        header = Header.model_validate_json(written)
        if header.key != key or sum(library.size for library in header.libraries) != len(rest):
            raise ValueError("the entry is another one's, or not whole")
        contents: list[bytes] = []
        for library in header.libraries:
            contents.append(rest[: library.size])
            rest = rest[library.size :]
        return cls(header, tuple(contents))


@dataclass(frozen=True, slots=True)
class Stored:
    """A file of the store: its name, its size in bytes, and when it was last used, in seconds since the epoch."""

    name: str
    size: int
    used: float


class _Folder(Protocol):
    """Where entries lie. All methods raise ``OSError`` or whatever the location's library raises."""

    def read(self, name: str) -> bytes: ...
    def write(self, name: str, data: bytes) -> None: ...
    def touch(self, name: str, data: bytes) -> None: ...
    def remove(self, name: str) -> None: ...
    def list(self) -> Iterator[Stored]: ...
    def is_due(self) -> bool: ...
    def has_room(self) -> bool: ...


class Store:
    """Builds by key. Any number of processes and hosts may share one.

    Attributes:
        fingerprint: what builds on this host depend on.
    """

    def __init__(self, location: str, most_bytes: int, fingerprint: str) -> None:
        """Open a store.

        Args:
            location: an absolute path, or a URL of fsspec such as ``s3://bucket/builds``.
            most_bytes: most bytes of all entries together; the longest unused go first.
            fingerprint: what builds on this host depend on (:mod:`workers.judge.host.toolchain`).
        """
        self._location = location
        self._most = most_bytes
        self.fingerprint: Final = fingerprint

    def as_json(self) -> list[Any]:
        """Return what another process opens the same store with, as arguments."""
        return [self._location, self._most, self.fingerprint]

    def key(self, source: str, flags: str) -> str:
        """Return the key of a build.

        Args:
            source: the kernel's.
            flags: what nvcc is told beside it: its targets where the source names none, and whether it notes lines.
                Empty on a CPU slot, where builds end otherwise.
        """
        return hashlib.sha256(json.dumps([self.fingerprint, flags, source]).encode()).hexdigest()

    def preload(self) -> None:
        """See that what a URL's location needs is installed, before a judge finds that it is not.

        Raises:
            ConfigError: there is no library for such locations here.
        """
        if "://" in self._location:
            protocol = self._location.partition("://")[0].rpartition("::")[2]
            try:
                importlib.import_module("fsspec").get_filesystem_class(protocol)
            except (ImportError, ValueError) as error:
                raise ConfigError(f"KQUEUE_BUILD_STORE: {error}") from None

    def get(self, key: str) -> Entry | None:
        """Return the build with a key, and note its use; None if there is none that is whole."""
        with contextlib.suppress(Exception):
            folder = self._folder()
            data = folder.read(key)
            try:
                entry = Entry.unpack(data, key)
            except ValueError:
                folder.remove(key)
                return None
            with contextlib.suppress(Exception):  # as read-only locations do
                folder.touch(key, data)
            return entry
        return None

    def put(self, entry: Entry) -> None:
        """Keep a build, and prune the store if it has grown beyond its bound; empty it if the disk is short of room."""
        data = entry.pack()
        if len(data) > self._most * _LARGEST_SHARE:
            return
        with contextlib.suppress(Exception):
            folder = self._folder()
            has_room = folder.has_room()
            if has_room:
                folder.write(entry.header.key, data)
            if folder.is_due():
                self._prune(folder, self._most if has_room else 0)

    def _prune(self, folder: _Folder, most: int) -> None:
        entries = sorted(folder.list(), key=lambda entry: entry.used)
        total = sum(entry.size for entry in entries)
        if total <= most:
            return
        for entry in entries:
            if total <= most * _LEFT_SHARE:
                return
            with contextlib.suppress(FileNotFoundError):  # another judge prunes too
                folder.remove(entry.name)
            total -= entry.size

    def _folder(self) -> _Folder:
        return _Remote(self._location) if "://" in self._location else _Local(Path(self._location))


class _Local:
    """A folder of this host's, or of a mount. Its owner alone may enter it."""

    def __init__(self, root: Path) -> None:
        """Make the folder if there is none.

        Raises:
            OSError: it cannot be made, or others may write to it.
        """
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        found = os.fstat(self._root)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(f"{root} must belong to the fleet's user, and to nobody else")

    def __del__(self) -> None:
        """Close the folder."""
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._root)

    def read(self, name: str) -> bytes:
        with os.fdopen(self._open(name, os.O_RDONLY), "rb") as stream:
            return stream.read()

    def write(self, name: str, data: bytes) -> None:
        part = f"{_PART}{os.getpid()}-{random.getrandbits(64):016x}"
        try:
            with os.fdopen(self._open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as stream:
                stream.write(data)
            os.rename(part, name, src_dir_fd=self._root, dst_dir_fd=self._root)
        except OSError:
            with contextlib.suppress(OSError):
                self.remove(part)
            raise

    def touch(self, name: str, data: bytes) -> None:  # noqa: ARG002
        os.utime(name, dir_fd=self._root, follow_symlinks=False)

    def remove(self, name: str) -> None:
        os.unlink(name, dir_fd=self._root)

    def list(self) -> Iterator[Stored]:
        with os.scandir(self._root) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    if entry.name.startswith(_PART) and found.st_mtime < time.time() - _PART_S:
                        self.remove(entry.name)
                    elif _KEY.fullmatch(entry.name):
                        yield Stored(entry.name, found.st_blocks * 512, found.st_mtime)

    def is_due(self) -> bool:
        return True

    def has_room(self) -> bool:
        disk = os.fstatvfs(self._root)
        return disk.f_bavail >= _FREE_SHARE * disk.f_blocks

    def _open(self, name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._root)


class _Remote:
    """A location of fsspec's, which judges of several hosts share. Its writes are whole, or the hash shows it."""

    def __init__(self, url: str) -> None:
        """Connect to it, with the credentials that its library finds without environment variables."""
        fsspec: Any = importlib.import_module("fsspec")
        self._files, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False)

    def read(self, name: str) -> bytes:
        return self._files.cat_file(self._path(name))

    def write(self, name: str, data: bytes) -> None:
        self._files.makedirs(self._root, exist_ok=True)
        self._files.pipe_file(self._path(name), data)

    def touch(self, name: str, data: bytes) -> None:
        """Write the entry again if its last use was long ago: these locations note nothing but writes."""
        if self._files.modified(self._path(name)).timestamp() < time.time() - _USE_S:
            self.write(name, data)

    def remove(self, name: str) -> None:
        self._files.rm_file(self._path(name))

    def list(self) -> Iterator[Stored]:
        for found in self._files.ls(self._root, detail=True):
            path = found["name"]
            name = path.rpartition("/")[2]
            if found["type"] == "file" and _KEY.fullmatch(name):
                yield Stored(name, found["size"], self._files.modified(path).timestamp())

    def has_room(self) -> bool:
        return True

    def is_due(self) -> bool:
        return random.randrange(_LOOK_EVERY) == 0  # noqa: S311

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"
