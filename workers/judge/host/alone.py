"""Rooms: a kernel that is suspected of killing workers is judged while nothing else uses its device.

One room a device, next to the device's lock (``Slot.lock``): two file locks. The room is shared by ordinary
evaluations, each from beginning to end; a suspect takes it exclusively. The turnstile before it lets nobody in
while a suspect waits or is inside, so that a stream of ordinary evaluations does not keep a suspect waiting for
ever. The kernel lets go of both when their holder dies, however it dies.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kqueue.limits import GPU_WAIT_S

#: Seconds between two looks at a lock. Asked for again and again and not waited for: an alarm would be needed to
#: end the waiting, and the judge has that for its deadlines.
_LOOK_S: Final = 0.02


class NoRoom(Exception):
    """The device did not become free in time."""


@contextmanager
def room(lock: Path, *, alone: bool, patience_s: float = GPU_WAIT_S) -> Generator[None]:
    """Use a device together with others, or ``alone``.

    Args:
        lock: the device's lock; the room's files lie beside it.
        alone: keep everybody else out.
        patience_s: how long to wait for that.

    Raises:
        NoRoom: it took longer.
    """
    deadline = time.monotonic() + patience_s
    with _open(lock.with_suffix(".turnstile")) as turnstile, _open(lock.with_suffix(".room")) as inside:
        _take(turnstile, alone, deadline)
        _take(inside, alone, deadline)
        if not alone:
            fcntl.flock(turnstile, fcntl.LOCK_UN)
        yield


@contextmanager
def _open(path: Path) -> Generator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _take(descriptor: int, alone: bool, deadline: float) -> None:
    kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise NoRoom(
                    "other evaluations did not leave the device to a suspected kernel in time"
                    if alone
                    else "a suspected kernel, which is judged alone, did not leave the device in time"
                ) from None
            time.sleep(_LOOK_S)
        else:
            return
