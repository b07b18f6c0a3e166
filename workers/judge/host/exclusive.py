"""Exclusive evaluations: a kernel runs while nothing else uses its devices.

It is suspected of killing workers, or spans several GPUs. Each device has one room, made of two file locks next to the
device's lock (``Slot.lock``). Ordinary evaluations share the room from beginning to end, and such a kernel holds it
exclusively. The turnstile is closed while such a kernel waits or runs, so that a stream of ordinary evaluations cannot
starve it. Linux releases both locks when their holder dies.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from kqueue.limits import GPU_WAIT_S
from workers.judge.host.turns import opened

#: Interval in seconds between two attempts to lock. A blocking lock would need SIGALRM for its timeout, but the judge's
#: deadlines already use SIGALRM.
_LOOK_S: Final = 0.02


class NoRoom(Exception):
    """The device did not become free in time."""


@contextmanager
def rooms(locks: Sequence[Path], *, alone: bool) -> Generator[None]:
    """Hold the rooms of several devices, in one order, so that no two holders wait for each other. See :func:`room`."""
    with ExitStack() as held:
        for lock in sorted(locks):
            held.enter_context(room(lock, alone=alone))
        yield


@contextmanager
def room(lock: Path, *, alone: bool, patience_s: float = GPU_WAIT_S) -> Generator[None]:
    """Hold a device's room inside a ``with`` block, exclusively or shared. Its files are next to the device's lock.

    Raise NoRoom if the wait exceeds ``patience_s``.
    """
    deadline = time.monotonic() + patience_s
    with opened(lock.with_suffix(".turnstile")) as turnstile, opened(lock.with_suffix(".room")) as inside:
        _take(turnstile, alone, deadline)
        _take(inside, alone, deadline)
        if not alone:
            fcntl.flock(turnstile, fcntl.LOCK_UN)
        yield


def _take(descriptor: int, exclusive: bool, deadline: float) -> None:
    kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise NoRoom(
                    "other evaluations did not release the device for an exclusive one in time"
                    if exclusive
                    else "an exclusive evaluation did not release the device in time"
                ) from None
            time.sleep(_LOOK_S)
        else:
            return
