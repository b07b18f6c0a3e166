"""The build store: results of sealed builders, cached for later evaluations of the same source.

An entry is one file under a key, which is a hash of everything that the build depends on
(:mod:`workers.judge.host.toolchain`). Only the judge reads and writes it, without unpickling. Each entry begins with a
hash of its content, and an entry with a wrong hash is removed. A failure of the store counts as a missing entry, so no
evaluation fails because of it.
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

#: Names of entries, and prefix of files during a write. Files with other names are never touched.
_KEY: Final = re.compile(r"[0-9a-f]{64}")
_PART: Final = "part-"
#: Maximum size of an entry as a share of the store, because a larger entry would displace all other entries.
_LARGEST_SHARE: Final = 1 / 8
#: Share of the size limit that pruning keeps, so that not every new entry causes pruning.
_LEFT_SHARE: Final = 0.9
#: Share of a disk that must stay free, because evaluations need the space more than builds.
_FREE_SHARE: Final = 0.1
#: Resolution in seconds of an entry's time of last use.
_USE_S: Final = 3600.0
#: Age in seconds of a partial file after which its writer is considered dead.
_PART_S: Final = 3600.0
#: Average number of writes between two prunings of an fsspec location, because a listing costs a request.
_LOOK_EVERY: Final = 16


class Library(BaseModel):
    """A library of an entry."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    #: Key under which the candidate finds it (:func:`workers.judge.candidate.libraries.key`).
    key: str
    name: str
    size: int


class Refusal(BaseModel):
    """A compiler's error in a source that would occur again."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    message: str
    exception: str


class Header(BaseModel):
    """The description of a build.

    Attributes:
        libraries: the libraries, in the order of their contents.
        log: end of the builder's log.
        peak_bytes: peak private memory of the builder's process tree.
        skipped: reason if the build stopped early.
        refusal: compiler's error if there are no libraries because of it.
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
    """A build: its description and the contents of its libraries."""

    header: Header
    contents: tuple[bytes, ...] = ()

    def pack(self) -> bytes:
        """Return the stored form of the entry: a hash, the header and the libraries."""
        body = self.header.model_dump_json().encode() + b"\n" + b"".join(self.contents)
        return hashlib.sha256(body).hexdigest().encode() + b"\n" + body

    @classmethod
    def unpack(cls, data: bytes, key: str) -> Entry:
        """Parse a stored entry, or raise ValueError if it is damaged or has another key."""
        digest, _, body = data.partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != digest:
            raise ValueError("the content does not match its hash")
        written, _, rest = body.partition(b"\n")
        header = Header.model_validate_json(written)
        if header.key != key or sum(library.size for library in header.libraries) != len(rest):
            raise ValueError("the entry has another key or is incomplete")
        contents: list[bytes] = []
        for library in header.libraries:
            contents.append(rest[: library.size])
            rest = rest[library.size :]
        return cls(header, tuple(contents))


@dataclass(frozen=True, slots=True)
class Stored:
    """A file of the store: its name, its size in bytes, and the time of its last use in seconds since the epoch."""

    name: str
    size: int
    used: float


class _Folder(Protocol):
    """A location of entries. All methods raise ``OSError`` or the errors of the location's library."""

    def read(self, name: str) -> bytes: ...
    def write(self, name: str, data: bytes) -> None: ...
    def touch(self, name: str, data: bytes) -> None: ...
    def remove(self, name: str) -> None: ...
    def list(self) -> Iterator[Stored]: ...
    def is_due(self) -> bool: ...
    def has_room(self) -> bool: ...


class Store:
    """The build store. Many processes and hosts can share a location."""

    def __init__(self, location: str, most_bytes: int, fingerprint: str) -> None:
        """Open a store.

        Args:
            location: an absolute path, or a URL of fsspec such as ``s3://bucket/builds``.
            most_bytes: maximum size of all entries together. The least recently used entries are removed first.
            fingerprint: hash of the host's build environment (:mod:`workers.judge.host.toolchain`).
        """
        self._location = location
        self._most = most_bytes
        self.fingerprint: Final = fingerprint

    def of(self, caches: str) -> Store:
        """Return the store with the builds of one owner, so that no owner notices another owner's builds.

        ``caches`` is the owner's name for caches (:meth:`workers.judge.api.Judges.judge`).
        """
        if not caches:
            return self
        return Store(self._location, self._most, hashlib.sha256(f"{caches} {self.fingerprint}".encode()).hexdigest())

    def as_json(self) -> list[Any]:
        """Return the constructor's arguments, with which another process can open the same store."""
        return [self._location, self._most, self.fingerprint]

    def key(self, source: str, flags: str) -> str:
        """Return the key of a build with further settings of nvcc: targets if the source names none, and source lines.

        ``flags`` is empty on a CPU slot, where builds have other results.
        """
        return hashlib.sha256(json.dumps([self.fingerprint, flags, source]).encode()).hexdigest()

    def preload(self) -> None:
        """Import the library for a URL's location, so that a missing one is found before the first judge starts."""
        if "://" in self._location:
            protocol = self._location.partition("://")[0].rpartition("::")[2]
            try:
                importlib.import_module("fsspec").get_filesystem_class(protocol)
            except (ImportError, ValueError) as error:
                raise ConfigError(f"KQUEUE_BUILD_STORE: {error}") from None

    def get(self, key: str) -> Entry | None:
        """Return the build with a key and update its time of last use. Return None if there is no intact entry."""
        with contextlib.suppress(Exception):
            folder = self._folder()
            data = folder.read(key)
            try:
                entry = Entry.unpack(data, key)
            except ValueError:
                folder.remove(key)
                return None
            with contextlib.suppress(Exception):  # read-only locations fail
                folder.touch(key, data)
            return entry
        return None

    def put(self, entry: Entry) -> None:
        """Store a build. Prune the store to its size limit, or empty it if the disk is nearly full."""
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


class InMemoryStore(Store):
    """Builds of one evaluation, in this process."""

    def __init__(self) -> None:
        super().__init__("", 0, "")
        self._entries: dict[str, Entry] = {}

    def get(self, key: str) -> Entry | None:
        return self._entries.get(key)

    def put(self, entry: Entry) -> None:
        self._entries[entry.header.key] = entry


class _Local:
    """A folder of this host or of a mount, accessible only to its owner."""

    def __init__(self, root: Path) -> None:
        """Open the folder, and create it if it is missing. Raise OSError if other users have access to it."""
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        status = os.fstat(self._root)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(f"{root} must belong to the fleet's user, and no other user can have access to it")

    def __del__(self) -> None:
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
                    status = entry.stat(follow_symlinks=False)
                    if entry.name.startswith(_PART) and status.st_mtime < time.time() - _PART_S:
                        self.remove(entry.name)
                    elif _KEY.fullmatch(entry.name):
                        yield Stored(entry.name, status.st_blocks * 512, status.st_mtime)

    def is_due(self) -> bool:
        return True

    def has_room(self) -> bool:
        disk = os.fstatvfs(self._root)
        return disk.f_bavail >= _FREE_SHARE * disk.f_blocks

    def _open(self, name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._root)


class _Remote:
    """A location of fsspec, which judges of several hosts share. A partial write is detected by the hash."""

    def __init__(self, url: str) -> None:
        """Connect with the credentials that the location's library finds without environment variables."""
        fsspec: Any = importlib.import_module("fsspec")
        self._files, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False)

    def read(self, name: str) -> bytes:
        return self._files.cat_file(self._path(name))

    def write(self, name: str, data: bytes) -> None:
        self._files.makedirs(self._root, exist_ok=True)
        self._files.pipe_file(self._path(name), data)

    def touch(self, name: str, data: bytes) -> None:
        """Write the entry again if its last use was long ago, because only writes change its time."""
        if self._files.modified(self._path(name)).timestamp() < time.time() - _USE_S:
            self.write(name, data)

    def remove(self, name: str) -> None:
        self._files.rm_file(self._path(name))

    def list(self) -> Iterator[Stored]:
        for file in self._files.ls(self._root, detail=True):
            path = file["name"]
            name = path.rpartition("/")[2]
            if file["type"] == "file" and _KEY.fullmatch(name):
                yield Stored(name, file["size"], self._files.modified(path).timestamp())

    def has_room(self) -> bool:
        return True

    def is_due(self) -> bool:
        return random.randrange(_LOOK_EVERY) == 0  # noqa: S311

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"
