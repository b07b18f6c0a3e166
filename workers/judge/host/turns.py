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
    """Hold a device's lock. Who waits for it lets nobody pass; those who share it wait, and get it, together.

    Args:
        lock: the lock's file; whoever waits locks the file ``.queue`` beside it.
        how: ``fcntl.LOCK_EX`` to have the device alone, ``fcntl.LOCK_SH`` to share it.
        waiting: makes a context that is entered while the device is waited for.
    """
    with opened(lock) as held:
        with opened(lock.with_suffix(".queue")) as queue:
            try:
                fcntl.flock(queue, how | fcntl.LOCK_NB)
                fcntl.flock(held, how | fcntl.LOCK_NB)
            except BlockingIOError:
                with waiting():
                    fcntl.flock(queue, how)
                    fcntl.flock(held, how)
        try:
            yield
        finally:
            fcntl.flock(held, fcntl.LOCK_UN)  # a process that was forked meanwhile has the descriptor too


@contextlib.contextmanager
def opened(path: Path) -> Generator[int]:
    """Open a lock's file, which is created if it is missing, for the length of a ``with`` block."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
