"""The worker process of one slot: its start, its messages on a socket, and its end."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final
from uuid import uuid4

import structlog

from kqueue import broker, logs
from kqueue.config import Config
from kqueue.folders import clean_environment
from kqueue.program import PYTHON
from workers.judge.host import linux
from workers.judge.host.status_page import StatusPage, make_page
from workers.plan import environment
from workers.pool import STUCK_S, kill_group
from workers.slot import GO, PAGE_VARIABLE, PAUSE, READY, READY_VARIABLE, SETTINGS_VARIABLE, STUCK, VARIABLE, Slot

_log: Any = structlog.get_logger(__name__)

#: Seconds before a worker that died young is started again. The first delay doubles each time up to the last.
_FIRST_BACKOFF_S: Final = 1.0
_LAST_BACKOFF_S: Final = 30.0
#: Seconds of life after which a worker is started again with the first delay.
_HEALTHY_S: Final = 60.0


@dataclass(slots=True)
class WorkerProcess:
    """A slot and its current worker process, if it has one.

    Attributes:
        slot: the slot, whose ``worker_id`` belongs to the current or last process.
        selector: the selector that watches the socket to the process while it runs.
        process: the process, or None while none runs.
        pid: the id of the current or last process.
        status_page: the page on which the process records its progress, or None while none runs.
        ready: whether the process has reported that it is ready.
        registered: whether its row in the table ``workers`` is open.
        failed: number of processes that ended before they were ready.
        killed_at: monotonic time of its SIGKILL, or 0.
        survivors: processes of the last worker that were killed and have not died.
        survived_at: monotonic time at which they were killed.
        stuck: the reason why nothing must run in the slot, which is a killed process that does not die, or None.
        start_at: monotonic time before which the next process does not start.
    """

    slot: Slot
    selector: selectors.BaseSelector
    process: subprocess.Popen[bytes] | None = None
    pid: int = 0
    status_page: StatusPage | None = None
    ready: bool = False
    registered: bool = False
    failed: int = 0
    killed_at: float = 0.0
    survivors: set[int] = field(default_factory=set[int])
    survived_at: float = 0.0
    stuck: str | None = None
    start_at: float = 0.0
    #: The supervisor's end of the socket pair to the process. None after the process ended or got the order to end.
    _link: socket.socket | None = None
    #: The last order that was sent.
    _order: bytes = b""
    _started_at: float = 0.0
    _backoff_s: float = _FIRST_BACKOFF_S

    def overdue(self, now: float, patience_s: float) -> bool:
        """Return whether the process has run for longer than ``patience_s`` without becoming ready."""
        return self.process is not None and not self.ready and now - self._started_at > patience_s

    @property
    def waits(self) -> bool:
        """True if the process is ready and waits for its first order."""
        return self.ready and not self.registered and self._link is not None

    def start(self, config: Config, *, program: str, host: str, cores: int) -> None:
        """Start a worker process, which runs the module ``program``, in the slot, whose directory must be empty."""
        self.slot = slot = replace(self.slot, worker_id=uuid4())
        ours, theirs = socket.socketpair()
        command = [*PYTHON, program, "worker"]
        command += ["-n", f"{slot.name}@{host}", "-Q", ",".join(broker.queue(lane).name for lane in slot.lanes)]
        command += ["--concurrency", "1", "--without-gossip", "--without-mingle", "-E"]
        command += ["--loglevel", config.log_level.upper()]
        # A killed worker's temporary files go with the slot's directory when the next worker starts.
        full = environment(slot, config, cores, os.environ) | {"TMPDIR": str(slot.scratch)}
        settings, page = in_memory(full), make_page()
        env = clean_environment(full) | logs.environment(config)
        env |= {
            VARIABLE: full[VARIABLE],
            READY_VARIABLE: str(theirs.fileno()),
            SETTINGS_VARIABLE: str(settings),
            PAGE_VARIABLE: str(page),
        }
        try:
            with theirs:
                # The separate session keeps a terminal's Ctrl-C from the worker. preexec_fn is safe because the
                # supervisor has one thread.
                self.process = subprocess.Popen(
                    command,
                    # Celery imports from its working directory, so no other user must be able to write there.
                    cwd="/",
                    env=env,
                    pass_fds=[theirs.fileno(), settings, page],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    preexec_fn=linux.die_with(os.getpid()),
                )
            self.status_page = StatusPage(page)
        finally:
            os.close(settings)
            os.close(page)
        ours.setblocking(False)
        self._link, self._order = ours, b""
        self.ready, self.registered = False, False
        self.killed_at, self.stuck = 0.0, None
        self._started_at = time.monotonic()
        self.selector.register(ours, selectors.EVENT_READ, self)
        self.pid = self.process.pid
        _log.info("worker started", slot=slot.name, device=slot.device, pid=self.pid)

    def hear(self) -> None:
        """Read the messages of the process: that it is ready, or that a process it killed does not die."""
        if self._link is None:
            return
        messages = b""
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            messages = self._link.recv(64)
        if not messages:
            # The process died, which the supervisor notices elsewhere.
            self.selector.unregister(self._link)
        for message in messages:
            if message == READY[0]:
                self.ready = True
            else:
                self.stuck = "a process that it killed does not die" if message == STUCK[0] else None
                _log.warning("a slot is stuck" if self.stuck else "a slot is free again", slot=self.slot.name)

    def tell(self, reason: str | None) -> None:
        """Order the process to pause for ``reason``, or to take messages if that is None."""
        order = GO if reason is None else PAUSE
        if self._link is not None and self._order != order:
            self._order = order
            with contextlib.suppress(OSError):  # the process died, which the supervisor notices elsewhere
                self._link.sendall(order)

    def finish(self) -> None:
        """Order the process to finish its evaluation and end."""
        if self.process is not None:
            _log.info("worker finishes and ends", slot=self.slot.name)
            self._hang_up()
            self.process.terminate()

    def kill(self) -> None:
        """Kill the process and its group."""
        if self.process is not None:
            self.killed_at = self.killed_at or time.monotonic()
            kill_group(self.process.pid)

    def returncode(self, now: float) -> int | None:
        """Return the exit status, or None while the process runs. A killed process that hangs counts as ended."""
        if self.process is None:
            return None
        code = self.process.poll()
        return -signal.SIGKILL if code is None and self.killed_at and now - self.killed_at > STUCK_S else code

    def close(self) -> None:
        """Note the end of the process, and schedule the start of the next one."""
        self._hang_up()
        self.failed += not self.ready
        now = time.monotonic()
        # A worker that ended because of failed evaluations was able to start. The next one can be sound.
        failed = self.status_page is not None and self.status_page.failures[0] > 0
        if failed or now - self._started_at >= _HEALTHY_S:
            self._backoff_s = _FIRST_BACKOFF_S
        self.process, self.registered, self.stuck, self.status_page = None, False, None, None
        self.postpone()

    def postpone(self) -> None:
        """Delay the start of the next process, each time for twice as long."""
        self.start_at = time.monotonic() + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, _LAST_BACKOFF_S)

    def _hang_up(self) -> None:
        if self._link is not None:
            if self._link in self.selector.get_map():
                self.selector.unregister(self._link)
            self._link.close()
            self._link = None


def in_memory(settings: Mapping[str, str]) -> int:
    """Return a descriptor of a memory file with the settings. Unlike an environment, no other process can read it."""
    descriptor = os.memfd_create("kqueue-settings", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(descriptor), "w") as stream:
        json.dump(dict(settings), stream)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
