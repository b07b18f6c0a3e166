"""The lock of a device: it is had alone or shared."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from pathlib import Path


@contextlib.contextmanager
def turn(
    lock: Path, how: int, waiting: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
) -> Generator[None]:
    """Hold a device's lock. Those who want it alone get it one after the other, then those who share it, together.

    So the device changes between the two kinds of use as seldom as it can. Nobody waits for ever: an evaluation shares
    the device before it has it alone, and has it alone a few times at most. Who waits to share it waits for the rest
    of these, once for each other place.

    Args:
        lock: the lock's file. Whoever has the device alone, or waits for that, locks the file ``.queue`` beside it.
        how: ``fcntl.LOCK_EX`` to have the device alone, ``fcntl.LOCK_SH`` to share it.
        waiting: makes a context that is entered while the device is waited for.
    """
    alone = how == fcntl.LOCK_EX
    # Who wants it alone is not kept from that by others who do; who wants to share it waits until nobody does.
    passing = fcntl.LOCK_SH if alone else fcntl.LOCK_EX
    with opened(lock) as held, opened(lock.with_suffix(".queue")) as queue:
        try:
            fcntl.flock(queue, passing | fcntl.LOCK_NB)
            fcntl.flock(held, how | fcntl.LOCK_NB)
        except BlockingIOError:
            with waiting():
                fcntl.flock(queue, passing)
                fcntl.flock(held, how)
        if not alone:
            fcntl.flock(queue, fcntl.LOCK_UN)
        try:
            yield
        finally:
            for descriptor in (held, queue):  # a process that was forked meanwhile has the descriptors too
                fcntl.flock(descriptor, fcntl.LOCK_UN)


@contextlib.contextmanager
def opened(path: Path) -> Generator[int]:
    """Open a lock's file, which is created if it is missing, for the length of a ``with`` block."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
