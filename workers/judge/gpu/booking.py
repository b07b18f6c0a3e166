"""The ledger of one GPU's memory: the judges of a host book what they are going to use, and wait while it does not fit.

There is no daemon. The ledger is a folder beside the device's lock, with one file for each booking. The process that
books holds a lock on its file. Linux releases the lock when the process dies, whatever kills it, and a file that nobody
has locked counts for nothing: whoever decides next removes it.

First come, first served, with one exception: what fits may pass those who came earlier and do not fit yet, until they
have waited for ten seconds. So small bookings use the memory that a large one cannot use yet, and never starve it.
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
from types import TracebackType
from typing import Final, Self

#: Seconds between two looks of a waiter: a twentieth of what it has waited, within limits. A look takes less
#: than half a millisecond.
_PAUSE_SHARE: Final = 0.05
_SHORTEST_PAUSE_S: Final = 0.01
_LONGEST_PAUSE_S: Final = 0.1
#: How long others may pass a waiter, in seconds.
_PATIENCE_S: Final = 10.0
#: A file: process, bytes, capacity, since, waiting, and then the label. A change never needs more of the disk, and one
#: that is read meanwhile, by somebody who does not decide, is still a booking.
_FIELDS: Final = struct.Struct("<qqqd?")
_LABEL_BYTES: Final = 200
_MOST_LOOKS: Final = 5
#: The file that is locked while somebody decides, and the name of a booking's file until it is complete.
_LOCK: Final = "lock"
_INCOMPLETE: Final = "new"
#: The file that is touched where memory that nobody has booked is wanted.
_WANTED: Final = "wanted"


class BookingError(Exception):
    """GPU memory could not be booked."""


class TooLarge(BookingError):
    """More is asked for than all bookings together may take. Waiting would not help."""


class NotInTime(BookingError, TimeoutError):
    """The memory did not become free in time."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A booking, as everybody sees it.

    Attributes:
        pid: the process that books.
        nbytes: the bytes of GPU memory.
        label: a name for people: an evaluation's id, or a slot's name.
        waiting: True while it waits for the memory, False while it holds it.
        since: when it began to wait, or to hold; seconds of the monotonic clock, which a host's processes share.
        capacity: the bytes that all bookings together may take, as the process that books knows it.
    """

    pid: int
    nbytes: int
    label: str
    waiting: bool
    since: float
    capacity: int


class Ledger:
    """The ledger of one GPU's memory. Any number of processes may use ledgers of one folder at the same time."""

    def __init__(self, folder: Path, capacity: int, *, patience_s: float = _PATIENCE_S) -> None:
        """Configure a ledger without creating anything.

        Args:
            folder: the folder of the bookings, which is created when it is needed. Its parent exists.
            capacity: the bytes that all bookings together may take.
            patience_s: how long the bookings of this ledger may pass one that waits, in seconds.
        """
        self._folder = folder
        self._capacity = capacity
        self._patience_s = patience_s

    def book(self, nbytes: int, *, label: str, wait_s: float) -> Booking:
        """Book memory. Wait while it does not fit beside what is booked, and for those who came earlier.

        Args:
            nbytes: the bytes of GPU memory.
            label: a name for people: an evaluation's id, or a slot's name.
            wait_s: the most seconds to wait.

        Raises:
            TooLarge: ``nbytes`` is above the capacity.
            NotInTime: the wait took longer.
        """
        if nbytes < 0:
            raise ValueError(f"{nbytes} bytes cannot be booked")
        if nbytes > self._capacity:
            raise TooLarge(
                f"{nbytes} bytes of GPU memory are needed, and all evaluations of this GPU together may use"
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
                        f" {self._capacity} are booked, and who came earlier is served first"
                    )
                pause = min(max(waited * _PAUSE_SHARE, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)
                time.sleep(min(pause, wait_s - waited))
            stack.pop_all()
        return Booking(self._folder, file, self._patience_s)

    def _admit(self, file: _File) -> bool:
        """Let a booking hold its memory if it fits and delays nobody. Return True if it does."""
        with _deciding(self._folder):
            others = [other for ticket, other in _living(self._folder) if ticket < file.ticket or not other.waiting]
            if file.entry.nbytes > _room(others, self._capacity, self._patience_s):
                return False
            file.write(replace(file.entry, waiting=False, since=time.monotonic()))
        return True

    def want_room(self) -> None:
        """Ask for memory that is held without a booking: references that are kept for later evaluations end then."""
        wanted_file(self._folder).touch(0o600)

    def holders(self) -> list[Entry]:
        """Return who holds memory and who waits for it, in the order in which they came."""
        return entries(self._folder)


class Booking:
    """Booked memory. :meth:`release`, the end of a ``with`` block and the end of the process give it back."""

    def __init__(self, folder: Path, file: _File, patience_s: float) -> None:
        """Wrap what :meth:`Ledger.book` has booked."""
        self._folder = folder
        self._file = file
        self._patience_s = patience_s

    def __enter__(self) -> Self:
        """Return the booking."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Give the memory back."""
        self.release()

    @property
    def nbytes(self) -> int:
        """The bytes that are booked."""
        return self._file.entry.nbytes

    def resize(self, nbytes: int) -> bool:
        """Book more or less without waiting. Return False, and change nothing, if that cannot be.

        Less can always be booked. More can be booked where it fits beside the others and beside those who wait: one of
        them that does not fit yet may be passed for a while.
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
        """Give the memory back. A second call does nothing."""
        self._file.remove()


def wanted_file(folder: Path) -> Path:
    """Return the file of a ledger that changes whenever memory is wanted that nobody has booked."""
    return folder / _WANTED


def entries(folder: Path) -> list[Entry]:
    """Return a ledger's bookings in the order in which they came.

    This waits for nobody, not even for a decision. It looks until two looks agree, so that it hardly ever misses one of
    two changes that belong together.
    """
    known = _look(folder)
    for _ in range(_MOST_LOOKS):
        before, known = known, _look(folder)
        if known == before:
            break
    return known


def _look(folder: Path) -> list[Entry]:
    return [entry for _, path in _files(folder) if (entry := _read(path)) is not None]


@dataclass(slots=True)
class _File:
    """The file of a booking of this process, which holds its lock."""

    path: Path
    descriptor: int
    ticket: int
    entry: Entry

    def write(self, entry: Entry) -> None:
        """Change the booking. Others read it while they decide, so only who decides may do this."""
        os.pwrite(self.descriptor, _to_bytes(entry), 0)
        self.entry = entry

    def remove(self) -> None:
        """Remove the booking, which may be done at any time. A second call does nothing."""
        if self.descriptor < 0:
            return
        # First, as a child process may have inherited the descriptor, and with it the lock.
        self.path.unlink(missing_ok=True)
        os.close(self.descriptor)
        self.descriptor = -1


@contextlib.contextmanager
def _deciding(folder: Path) -> Generator[None]:
    """Let nobody else decide during the block, which takes a fraction of a millisecond."""
    folder.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _join(folder: Path, entry: Entry) -> _File:
    """Add a booking to the end of the queue."""
    incomplete = folder / _INCOMPLETE
    incomplete.unlink(missing_ok=True)  # its process died here
    # Clocks of a later boot may give a ticket that a dead process still has.
    ticket = max(time.monotonic_ns(), *(ticket + 1 for ticket, _ in _files(folder)), 0)
    path = folder / f"{ticket:020}"
    descriptor = os.open(incomplete, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(descriptor, _to_bytes(entry), 0)
        incomplete.rename(path)  # so whoever sees a booking sees it locked and complete
    except BaseException:
        os.close(descriptor)
        raise
    return _File(path, descriptor, ticket, entry)


def _room(others: list[Entry], capacity: int, patience_s: float) -> int:
    """Return the bytes that can be booked beside others, or -1 if one of them waits and must not be passed.

    Args:
        others: those who hold memory, and those who wait and come first, in order.
        capacity: the bytes that all together may take.
        patience_s: how long one that does not fit yet may be passed, in seconds.
    """
    room, now = capacity - _booked(others), time.monotonic()
    for other in others:
        if other.waiting and other.nbytes <= room:
            room -= other.nbytes
        elif other.waiting and now - other.since >= patience_s:
            return -1
    return room


def _living(folder: Path) -> Iterator[tuple[int, Entry]]:
    """Yield all bookings with their tickets, in order, and remove those of dead processes."""
    for ticket, path in _files(folder):
        if (entry := _read(path)) is not None:
            yield ticket, entry
        else:
            path.unlink(missing_ok=True)


def _booked(others: Iterable[Entry]) -> int:
    return sum(other.nbytes for other in others if not other.waiting)


def _files(folder: Path) -> list[tuple[int, Path]]:
    """Return the tickets and files of a ledger, those of dead processes too."""
    try:
        paths = sorted(folder.iterdir())
    except FileNotFoundError:  # nobody has booked yet
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
    label = record[_FIELDS.size :].decode("utf-8", "replace")
    return Entry(pid, nbytes, label, waiting, since, capacity)
