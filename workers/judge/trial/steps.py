"""What an evaluation does now, for how long it may and did, and whose the device is meanwhile.

Every step is a ``with`` block. Its phase and deadline stand in the black box, which is read should the judge
die; past its time the kernel ends the judge itself, whatever it executes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Generator
from typing import Final

from kqueue.contract import Deadlines, Phase
from kqueue.limits import GPU_WAIT_S
from workers.judge.host.blackbox import BlackBox
from workers.judge.place import Place

#: Seconds beyond the candidate's own deadline after which the judge itself is ended.
_BACKSTOP_S: Final = 30.0
#: How long the device is waited for only to test it: a verdict is known, and others will test it.
_TEST_WAIT_S: Final = 30.0


class Steps:
    """The steps of one evaluation.

    Attributes:
        durations: seconds that each named step took, in all.
    """

    def __init__(self, blackbox: BlackBox, place: Place, deadlines: Deadlines) -> None:
        self._blackbox = blackbox
        self._place = place
        self._deadlines = deadlines
        self.durations: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(self, name: str) -> Generator[None]:
        """Count the block's time among the durations."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.durations[name] = self.durations.get(name, 0.0) + time.monotonic() - begun

    @contextlib.contextmanager
    def alone(self, what: str) -> Generator[None]:
        """Have the device alone among its slots."""
        self._blackbox.enter(Phase.PREPARE)
        with self._lock() as lock:
            with self.timed("wait_for_device"), _alarm(GPU_WAIT_S):
                fcntl.flock(lock, fcntl.LOCK_EX)
            with self.timed(f"alone_{what}"):
                yield

    @contextlib.contextmanager
    def device_soon(self) -> Generator[bool]:
        """Have the device alone, if it is free before long; says whether it is."""
        with self._lock() as lock:
            deadline = time.monotonic() + _TEST_WAIT_S
            had = False
            with self.timed("wait_for_device"):
                while not had and time.monotonic() < deadline:
                    try:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        had = True
                    except BlockingIOError:
                        time.sleep(0.005)
            yield had

    @contextlib.contextmanager
    def backstop(self, phase: Phase) -> Generator[None]:
        """Should every deadline below fail, the judge itself ends: its parent records ``judge_error``."""
        self._blackbox.enter(phase)
        with _alarm(self._deadlines.total_s + _BACKSTOP_S):
            yield

    @contextlib.contextmanager
    def _lock(self) -> Generator[int]:
        lock = os.open(self._place.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield lock
        finally:
            os.close(lock)


@contextlib.contextmanager
def _alarm(seconds: float) -> Generator[None]:
    """End this process, whatever it executes, unless the block is left within ``seconds``.

    Within another such block that one's time goes on when this one is left.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel's own doing: a handler would wait for Python
    begun = time.monotonic()
    outer, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        left = max(outer - (time.monotonic() - begun), 0.001) if outer else 0
        signal.setitimer(signal.ITIMER_REAL, left)
