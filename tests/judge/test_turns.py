"""The lock of a device: exclusive, or shared by the processes that wait for a share."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tests.waiting import until
from workers.judge.host.turns import turn


class _Place:
    """A thread that holds the lock until it is released."""

    def __init__(self, lock: Path, how: int) -> None:
        self.has, self.waits = threading.Event(), threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._hold, args=(lock, how))
        self._thread.start()

    def _hold(self, lock: Path, how: int) -> None:
        with turn(lock, how, self._waiting):
            self.has.set()
            self._over.wait(60)

    @contextmanager
    def _waiting(self) -> Generator[None]:
        self.waits.set()
        yield

    def ends(self) -> None:
        self._over.set()
        self._thread.join(60)


def test_the_device_is_had_alone_by_all_who_wait_for_that_and_then_shared_by_all_others(tmp_path: Path) -> None:
    lock = tmp_path / "device.lock"
    alone = _Place(lock, fcntl.LOCK_EX)
    assert alone.has.wait(60)
    sharing = [_Place(lock, fcntl.LOCK_SH) for _ in range(2)]
    assert all(place.waits.wait(60) for place in sharing)
    second = _Place(lock, fcntl.LOCK_EX)
    assert second.waits.wait(60)
    until(lambda: _want_it_alone(lock) == 2, what="its place in the queue")
    alone.ends()
    assert second.has.wait(60)
    assert not any(place.has.is_set() for place in sharing)
    second.ends()
    assert all(place.has.wait(60) for place in sharing)

    last = _Place(lock, fcntl.LOCK_EX)
    assert last.waits.wait(60)
    until(lambda: _want_it_alone(lock) == 1, what="its place in the queue")
    late = _Place(lock, fcntl.LOCK_SH)
    assert late.waits.wait(60)
    sharing[0].ends()
    assert not last.has.is_set()
    sharing[1].ends()
    assert last.has.wait(60)
    assert not late.has.is_set()
    last.ends()
    assert late.has.wait(60)
    late.ends()


def _want_it_alone(lock: Path) -> int:
    """Return the number of holders and waiters for exclusive use, which share the lock of the queue."""
    found = lock.with_suffix(".queue").stat()
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    lines = map(str.split, Path("/proc/locks").read_text().splitlines())
    return sum(place in words and words[1] == "FLOCK" and words[3] == "READ" for words in lines)
