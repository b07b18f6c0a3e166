"""The page of flags that the judge, one sealed process and the fork server share.

It has one counter in each cache line. CPUs read and write the counters, and so do CUDA streams
(:mod:`workers.judge.channel.semaphores`). The sealed process can write any value to the page. READY and DONE are its
claims, which the judge checks by the outputs. COMPILING moves time from one of its deadlines to another, and
ON_GPU can end the process earlier. NARROW turns a wrong answer on a CPU into a doubt.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Callable
from typing import Final

#: Word with the number of the timed call that the judge lets start.
GO: Final = 0
#: Word with the number of the timed call that the candidate is ready for.
READY: Final = 16
#: Word with the number of the timed call that the candidate has finished.
DONE: Final = 32
#: Word that is 1 while a compiler runs for the candidate.
COMPILING: Final = 48
#: Word with the random seed of the timed call, which the judge writes when the call's clock runs.
SEED: Final = 64
#: Word with the number of the last order whose calls the candidate's own clock timed, and the first of the words with
#: these times in nanoseconds.
TIMED: Final = 80
OWN_NS: Final = 144
#: Word that is 1 while the candidate waits for the GPU after a checked call.
ON_GPU: Final = 128
#: Word that is 1 once Triton's interpreter has rounded a result to bfloat16 or float8, by the candidate's claim.
NARROW: Final = 112

_SIZE: Final = mmap.PAGESIZE
#: Iterations of the wait loop between two calls of ``gone`` (about 1 ms).
_LOOK: Final = 1 << 14
#: Iterations after which a wait with ``nap`` begins to sleep (about 0.3 ms).
_SPIN: Final = 1 << 12
#: Duration in seconds of one sleep.
_NAP_S: Final = 50e-6


def create() -> int:
    """Create a page and return its descriptor."""
    return memory("kqueue-flags", _SIZE)


def memory(name: str, nbytes: int) -> int:
    """Create shared memory and return its descriptor.

    The size is sealed, because access to a page that another process truncated would kill the reader by SIGBUS.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor


def attach(descriptor: int) -> memoryview[int]:
    """Map the page and return a view of its 64-bit words, indexed by the constants above."""
    return memoryview(mmap.mmap(descriptor, _SIZE)).cast("Q")


def wait(page: memoryview[int], flag: int, number: int, *, nap: bool, gone: Callable[[], bool] | None = None) -> None:
    """Wait until the word ``flag`` equals ``number``.

    Args:
        nap: sleep briefly during a longer wait. On a CPU two spinning processes would take the cores from the timed
            work. On a GPU a sleep would make the timing less precise.
        gone: function called regularly. The wait ends when it returns True.
    """
    turns = 0
    while page[flag] != number:
        turns += 1
        if gone is not None and turns % _LOOK == 0 and gone():
            return
        if nap and turns > _SPIN:
            time.sleep(_NAP_S)
            turns += _LOOK >> 4
