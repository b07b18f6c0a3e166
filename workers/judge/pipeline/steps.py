"""Steps of an evaluation: their phases, deadlines and durations, and the device's lock.

Every step is a ``with`` block. The status page shows its name, phase and deadline, from which the requester can explain
the judge's death. An alarm of the operating system ends a judge that overruns its time, whatever code it runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import signal
import threading
import time
from collections.abc import Generator
from typing import Final

from kqueue.contract import Phase
from kqueue.limits import GPU_WAIT_S
from workers.judge.host import holders
from workers.judge.host.status_page import StatusPage
from workers.judge.host.turns import turn
from workers.judge.slot_config import SlotConfig

#: Seconds beyond all deadlines of an evaluation after which the judge itself is ended.
_BACKSTOP_S: Final = 30.0
#: Seconds between queries for the holder of the device while the judge waits for it.
_LOOK_S: Final = 1.0


class Steps:
    """Steps of one evaluation.

    Attributes:
        durations: total seconds of each named step.
        begun: seconds from the judge's start to the first start of each named step.
        waited_for: descriptions of the foreign processes that held the device during waits.
    """

    def __init__(self, status_page: StatusPage, slot: SlotConfig, total_s: float) -> None:
        self._status_page = status_page
        self._slot = slot
        self._total_s = total_s
        self.durations: dict[str, float] = {}
        self.begun: dict[str, float] = {}
        self._began = time.monotonic()
        self.waited_for: list[str] = []
        self._step = ""

    def enter(self, phase: Phase, deadline: float = 0.0) -> None:
        """Show a phase on the status page. See :meth:`.StatusPage.enter`."""
        self._status_page.enter(phase, deadline)

    @contextlib.contextmanager
    def timed(self, name: str) -> Generator[None]:
        """Add the block's time to the named duration."""
        begun = time.monotonic()
        self.begun.setdefault(name, begun - self._began)
        outer, self._step = self._step, name
        self._status_page.at(name)
        try:
            yield
        finally:
            self._step = outer
            self._status_page.at(outer)
            self.durations[name] = self.durations.get(name, 0.0) + time.monotonic() - begun

    @contextlib.contextmanager
    def alone(self, what: str) -> Generator[None]:
        """Hold the device exclusively, for timing."""
        with self._device(fcntl.LOCK_EX), self.timed(f"alone_{what}"):
            yield

    @contextlib.contextmanager
    def untimed(self, what: str) -> Generator[None]:
        """Share the device with other untimed work. No slot times on it meanwhile."""
        with self._device(fcntl.LOCK_SH), self.timed(f"untimed_{what}"):
            yield

    @contextlib.contextmanager
    def backstop(self, phase: Phase) -> Generator[None]:
        """End the judge itself if every other deadline fails. The requester then reports ``judge_error``."""
        self.enter(phase)
        with _alarm(self._total_s + _BACKSTOP_S):
            yield

    @contextlib.contextmanager
    def _watched(self) -> Generator[None]:
        """Record the foreign processes that hold the device while the block waits for it."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(_LOOK_S):
                holder = holders.stranger(self._slot.lock)
                if holder is not None and holder.words not in self.waited_for:
                    self.waited_for.append(holder.words)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()

    @contextlib.contextmanager
    def _device(self, how: int) -> Generator[None]:
        """Hold the device's lock."""
        self.enter(Phase.PREPARE)
        with contextlib.ExitStack() as held:
            with self.timed("wait_for_device"), _alarm(GPU_WAIT_S):
                held.enter_context(turn(self._slot.lock, how, self._watched))
            yield


@contextlib.contextmanager
def _alarm(seconds: float) -> Generator[None]:
    """End this process, whatever code it runs, unless the block ends within ``seconds``."""
    # The default action ends the process at once. A handler would wait for the Python interpreter.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    begun = time.monotonic()
    # Blocks can be nested. The outer block's time continues after the inner block.
    outer, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        left = max(outer - (time.monotonic() - begun), 0.001) if outer else 0
        signal.setitimer(signal.ITIMER_REAL, left)
