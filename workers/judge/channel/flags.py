"""The page of flags that the judge, one sealed process and the fork server share.

It holds counters, each on a cache line of its own. CPUs read and write them, and so do CUDA streams
(:mod:`workers.judge.channel.semaphores`). The sealed process may write anything here. READY and DONE are its claims,
which the judge checks by the outputs. COMPILING moves time from one of its deadlines to another.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Callable
from typing import Final

#: The number of the timed call that the judge has given the go-ahead for.
GO: Final = 0
#: The number of the timed call that the candidate stands ready for.
READY: Final = 16
#: The number of the timed call that the candidate has finished.
DONE: Final = 32
#: 1 while a compiler runs for the candidate.
COMPILING: Final = 48

_SIZE: Final = mmap.PAGESIZE
#: Turns of the waiting loop between looks at anything else (about 1 ms).
_LOOK: Final = 1 << 14
#: Turns after which a wait that may sleep does (about 0.3 ms), and for how long, in seconds.
_SPIN: Final = 1 << 12
_NAP_S: Final = 50e-6


def create() -> int:
    """Make a page; return its descriptor."""
    return memory("kqueue-flags", _SIZE)


def memory(name: str, nbytes: int) -> int:
    """Return a descriptor of shared memory whose size is sealed: touching a page that is gone would kill a process."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor


def attach(descriptor: int) -> memoryview[int]:
    """Map the page: a view of 64-bit words, indexed by the constants above."""
    return memoryview(mmap.mmap(descriptor, _SIZE)).cast("Q")


def wait(page: memoryview[int], flag: int, number: int, *, nap: bool, gone: Callable[[], bool] | None = None) -> None:
    """Wait until ``flag`` shows ``number``.

    Args:
        page: what :func:`attach` gave.
        flag: which.
        number: the call's.
        nap: sleep for moments when it takes longer. On a CPU two spinning processes would take the cores from the
            work itself; on a GPU a nap would blur the clock.
        gone: asked now and then; True ends the wait.
    """
    turns = 0
    while page[flag] != number:
        turns += 1
        if gone is not None and turns % _LOOK == 0 and gone():
            return
        if nap and turns > _SPIN:
            time.sleep(_NAP_S)
            turns += _LOOK >> 4
