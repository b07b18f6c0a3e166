"""The lock of a device: had alone, or shared by all who wait to share it."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tests.waiting import until
from workers.judge.host.turns import turn


class _Place:
    """Holds the lock in a thread of its own, from when it gets it until it is told to let go."""

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


def test_who_share_it_get_it_together_and_nobody_passes_one_who_waits(tmp_path: Path) -> None:
    """Two wait while one has it alone, and get it at once; who comes after one that wants it alone comes after it."""
    lock = tmp_path / "device.lock"
    alone = _Place(lock, fcntl.LOCK_EX)
    assert alone.has.wait(60)
    sharing = [_Place(lock, fcntl.LOCK_SH) for _ in range(2)]
    assert all(place.waits.wait(60) for place in sharing)
    assert not any(place.has.is_set() for place in sharing)
    alone.ends()
    assert all(place.has.wait(60) for place in sharing)

    last = _Place(lock, fcntl.LOCK_EX)
    assert last.waits.wait(60)
    until(lambda: _is_wanted_alone(lock), what="its place in the queue")
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


def _is_wanted_alone(lock: Path) -> bool:
    """Whether one that wants the device alone is the next: it keeps all others out of the queue."""
    with lock.with_suffix(".queue").open() as queue:
        try:
            fcntl.flock(queue, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
