"""The lock of a device, held exclusively or shared."""

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
    """Hold a device's lock. Exclusive holders get it one by one, and then all shared holders together.

    So the device changes between the two kinds of use as rarely as possible. No process starves: an evaluation first
    holds the lock shared, and then exclusively a few times at most. A process that waits for the shared lock waits for
    the rest of these exclusive uses, once for each other slot.

    Args:
        lock: file of the lock. A process that holds the lock exclusively, or waits for that, also locks the file
            ``.queue`` next to it.
        how: ``fcntl.LOCK_EX`` for an exclusive lock, ``fcntl.LOCK_SH`` for a shared one.
        waiting: factory of a context that is entered during a wait.
    """
    exclusive = how == fcntl.LOCK_EX
    # Exclusive waiters share the queue's lock. A shared waiter takes it exclusively, so it waits until there are none.
    passing = fcntl.LOCK_SH if exclusive else fcntl.LOCK_EX
    with opened(lock) as held, opened(lock.with_suffix(".queue")) as queue:
        try:
            fcntl.flock(queue, passing | fcntl.LOCK_NB)
            fcntl.flock(held, how | fcntl.LOCK_NB)
        except BlockingIOError:
            with waiting():
                fcntl.flock(queue, passing)
                fcntl.flock(held, how)
        if not exclusive:
            fcntl.flock(queue, fcntl.LOCK_UN)
        try:
            yield
        finally:
            for descriptor in (held, queue):  # a process forked in the block has the descriptors too
                fcntl.flock(descriptor, fcntl.LOCK_UN)


@contextlib.contextmanager
def opened(path: Path) -> Generator[int]:
    """Open a lock's file inside a ``with`` block. Create it if it is missing."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
