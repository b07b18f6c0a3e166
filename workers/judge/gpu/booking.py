"""The ledger of one GPU's memory, in which the judges of a host book memory and wait until it is free.

There is no daemon. The ledger is a folder next to the device's lock, with one file for each booking. The process that
books holds a lock on its file. Linux releases the lock when the process dies for any reason. A file without a lock does
not count, and the next process that makes a decision removes it.

Bookings are served in order of arrival, with one exception: a booking that fits can pass earlier bookings that do not
fit yet, until they have waited for ten seconds. So small bookings use memory that is not enough for a large one,
without starving it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

from workers.judge.host.turns import opened

#: Interval at which a waiting process checks the ledger: a twentieth of its waiting time, within limits in seconds. A
#: check takes less than 0.5 ms.
_PAUSE_SHARE: Final = 0.05
_SHORTEST_PAUSE_S: Final = 0.01
_LONGEST_PAUSE_S: Final = 0.1
#: Time in seconds for which other bookings can pass a waiting one.
_PATIENCE_S: Final = 10.0
#: Fields of a file: pid, bytes, capacity, since, waiting, and then the label. The size is fixed, so that a change needs
#: no disk space, and a read without the lock during a change still gives a booking.
_FIELDS: Final = struct.Struct("<qqqd?")
_LABEL_BYTES: Final = 200
_MOST_READS: Final = 5
#: File that is locked during a decision, and name of a booking's file until it is complete.
_LOCK: Final = "lock"
_INCOMPLETE: Final = "new"
#: File that is touched when a process needs memory that is used without a booking.
_WANTED: Final = "wanted"


class BookingError(Exception):
    """GPU memory could not be booked."""


class TooLarge(BookingError):
    """The booking exceeds the capacity for all bookings together, so a wait would not help."""


class NotInTime(BookingError, TimeoutError):
    """The memory did not become free in time."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A booking, as every process can read it.

    Attributes:
        nbytes: booked GPU memory in bytes.
        label: label for people: an evaluation's id, or a slot's name.
        waiting: True while the booking waits for the memory, False while it holds it.
        since: time in seconds at which it began to wait or to hold, on the monotonic clock that all processes share.
        capacity: memory in bytes for all bookings together, from the booking process's ledger.
    """

    pid: int
    nbytes: int
    label: str
    waiting: bool
    since: float
    capacity: int


class Ledger:
    """The ledger of one GPU's memory. Many processes can use the ledger of one folder at the same time."""

    def __init__(self, folder: Path, capacity: int, *, patience_s: float = _PATIENCE_S) -> None:
        """Configure a ledger for ``capacity`` bytes without creating anything. The parent of ``folder`` must exist.

        Its bookings can pass a waiting one for ``patience_s`` seconds.
        """
        self._folder = folder
        self._capacity = capacity
        self._patience_s = patience_s

    def book(self, nbytes: int, *, label: str, wait_s: float) -> Booking:
        """Book memory once it is free and earlier bookings are served. Raise TooLarge, or NotInTime after a wait."""
        if nbytes < 0:
            raise ValueError(f"{nbytes} bytes cannot be booked")
        if nbytes > self._capacity:
            raise TooLarge(
                f"{nbytes} bytes of GPU memory are needed, and all evaluations of this GPU together can use"
                f" {self._capacity}"
            )
        begun = time.monotonic()
        with _deciding(self._folder):
            file = _join(self._folder, Entry(os.getpid(), nbytes, label, True, begun, self._capacity))
        with contextlib.ExitStack() as stack:
            stack.callback(file.remove)
            while not self._admit(file):
                waited = time.monotonic() - begun
                if waited >= wait_s:
                    booked = _booked(self.holders())
                    raise NotInTime(
                        f"{nbytes} bytes of GPU memory did not become free within {wait_s:g} s: {booked} of"
                        f" {self._capacity} are booked, and earlier bookings are served first"
                    )
                pause = min(max(waited * _PAUSE_SHARE, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)
                time.sleep(min(pause, wait_s - waited))
            stack.pop_all()
        return Booking(self._folder, file, self._patience_s)

    def _admit(self, file: _File) -> bool:
        """Hold a booking's memory if it fits and delays no other booking. Return whether it does."""
        with _deciding(self._folder):
            others = [other for ticket, other in _living(self._folder) if ticket < file.ticket or not other.waiting]
            if file.entry.nbytes > _room(others, self._capacity, self._patience_s):
                return False
            file.write(replace(file.entry, waiting=False, since=time.monotonic()))
        return True

    def want_room(self) -> None:
        """Request memory that is used without a booking, so that references cached for later evaluations end."""
        wanted_file(self._folder).touch(0o600)

    def holders(self) -> list[Entry]:
        """Return the bookings that hold or wait for memory, in order of arrival."""
        return entries(self._folder)


class Booking:
    """Booked memory. :meth:`release`, the end of a ``with`` block or the end of the process frees it."""

    def __init__(self, folder: Path, file: _File, patience_s: float) -> None:
        self._folder = folder
        self._file = file
        self._patience_s = patience_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def nbytes(self) -> int:
        """Return the number of booked bytes."""
        return self._file.entry.nbytes

    def resize(self, nbytes: int) -> bool:
        """Change the size of the booking without a wait. Return False, and change nothing, if that is impossible.

        A smaller size is always possible. A larger one must fit next to all bookings, except that it can pass a waiting
        booking that does not fit yet, for a limited time.
        """
        if nbytes < 0:
            raise ValueError(f"{nbytes} bytes cannot be booked")
        with _deciding(self._folder):
            entry = self._file.entry
            if nbytes > entry.nbytes:
                others = [other for ticket, other in _living(self._folder) if ticket != self._file.ticket]
                if nbytes > _room(others, entry.capacity, self._patience_s):
                    return False
            self._file.write(replace(entry, nbytes=nbytes))
        return True

    def release(self) -> None:
        """Free the memory. A second call does nothing."""
        self._file.remove()


def wanted_file(folder: Path) -> Path:
    """Return the file of a ledger that is touched when a process needs memory that is used without a booking."""
    return folder / _WANTED


def entries(folder: Path) -> list[Entry]:
    """Return a ledger's bookings in order of arrival, without a lock."""
    # Read until two reads agree, so that it hardly ever misses one of two changes that belong together.
    bookings = _read_all(folder)
    for _ in range(_MOST_READS):
        before, bookings = bookings, _read_all(folder)
        if bookings == before:
            break
    return bookings


def _read_all(folder: Path) -> list[Entry]:
    return [entry for _, path in _files(folder) if (entry := _read(path)) is not None]


@dataclass(slots=True)
class _File:
    """The file of a booking of this process, which holds its lock."""

    path: Path
    descriptor: int
    ticket: int
    entry: Entry

    def write(self, entry: Entry) -> None:
        """Change the booking. The caller must hold the ledger's lock, because decisions read the booking."""
        os.pwrite(self.descriptor, _to_bytes(entry), 0)
        self.entry = entry

    def remove(self) -> None:
        """Remove the booking, at any time. A second call does nothing."""
        if self.descriptor < 0:
            return
        # Unlinked first, because a child process can have inherited the descriptor, and with it the lock.
        self.path.unlink(missing_ok=True)
        os.close(self.descriptor)
        self.descriptor = -1


@contextlib.contextmanager
def _deciding(folder: Path) -> Generator[None]:
    """Hold the ledger's lock during the block, which takes a fraction of a millisecond."""
    folder.mkdir(mode=0o700, exist_ok=True)
    with opened(folder / _LOCK) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def _join(folder: Path, entry: Entry) -> _File:
    """Add a booking to the end of the queue."""
    incomplete = folder / _INCOMPLETE
    incomplete.unlink(missing_ok=True)  # its process died during this function
    # The clock of a later boot can give a ticket that a dead process's file still has.
    ticket = max(time.monotonic_ns(), *(ticket + 1 for ticket, _ in _files(folder)), 0)
    path = folder / f"{ticket:020}"
    descriptor = os.open(incomplete, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(descriptor, _to_bytes(entry), 0)
        incomplete.rename(path)  # so a visible booking is always locked and complete
    except BaseException:
        os.close(descriptor)
        raise
    return _File(path, descriptor, ticket, entry)


def _room(others: list[Entry], capacity: int, patience_s: float) -> int:
    """Return the bytes that can still be booked, or -1 if a waiting booking must not be passed."""
    # ``others`` are the bookings that hold memory, and the waiting bookings with priority, in order.
    room, now = capacity - _booked(others), time.monotonic()
    for other in others:
        if other.waiting and other.nbytes <= room:
            room -= other.nbytes
        elif other.waiting and now - other.since >= patience_s:
            return -1
    return room


def _living(folder: Path) -> Iterator[tuple[int, Entry]]:
    """Yield all bookings with their tickets, in order, and remove bookings of dead processes."""
    for ticket, path in _files(folder):
        if (entry := _read(path)) is not None:
            yield ticket, entry
        else:
            path.unlink(missing_ok=True)


def _booked(others: Iterable[Entry]) -> int:
    return sum(other.nbytes for other in others if not other.waiting)


def _files(folder: Path) -> list[tuple[int, Path]]:
    """Return the tickets and files of a ledger, including files of dead processes."""
    try:
        paths = sorted(folder.iterdir())
    except FileNotFoundError:  # no booking was made yet
        return []
    return [(int(path.name), path) for path in paths if path.name.isdigit()]


def _read(path: Path) -> Entry | None:
    """Return the booking in a file, or None if its process is dead or has removed it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _from_bytes(os.read(descriptor, _FIELDS.size + _LABEL_BYTES))
    else:
        return None
    finally:
        os.close(descriptor)


def _to_bytes(entry: Entry) -> bytes:
    fields = _FIELDS.pack(entry.pid, entry.nbytes, entry.capacity, entry.since, entry.waiting)
    return fields + entry.label.encode("utf-8", "replace")[:_LABEL_BYTES]


def _from_bytes(record: bytes) -> Entry:
    pid, nbytes, capacity, since, waiting = _FIELDS.unpack_from(record)
    return Entry(pid, nbytes, record[_FIELDS.size :].decode("utf-8", "replace"), waiting, since, capacity)
