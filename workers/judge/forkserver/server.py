"""The fork server, the trusted parent of a slot's sealed processes. It has imported their libraries and has no secrets.

A slot's worker forks it after importing torch and Triton and before reading any secret (:mod:`workers.start`). The
fork server never initialises CUDA. It forks a sealed process when the judge requests one
(:mod:`workers.judge.forkserver.spawn`), and watches it (:mod:`workers.judge.forkserver.watch`). Only the fork server
ends sealed processes: at a phase's deadline, when they exceed their limits of memory, output or files, at the judge's
request, and when the judge is gone. Then it kills remaining child processes (:mod:`workers.judge.forkserver.orphans`)
and reports. It also keeps processes for later evaluations (:mod:`workers.judge.forkserver.kept`).

:mod:`workers.judge.forkserver.control` defines its messages.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import time
import warnings
from typing import Any, NoReturn

import structlog
import torch

from kqueue import logs
from workers.judge.channel.packets import receive_with_fds
from workers.judge.forkserver import control, prewarm
from workers.judge.forkserver.control import End, Keep, Spawn, Take
from workers.judge.forkserver.kept import IDLE, KeptProcesses
from workers.judge.forkserver.launchers import Launchers
from workers.judge.forkserver.spawn import Spawner
from workers.judge.forkserver.watch import Watch
from workers.judge.host import linux
from workers.judge.sandbox import self_check

_log: Any = structlog.get_logger(__name__)


class EventLoop:
    """The event loop of the fork server. It runs until the parent closes the request socket."""

    def __init__(self, requests: socket.socket, base: self_check.SelfCheck, triton_files: dict[str, bytes]) -> None:
        self._requests = requests
        self._selector = selectors.DefaultSelector()
        launchers = Launchers(triton_files)
        self._watch = Watch(self._selector, launchers, seccomp=base.measures["seccomp"] is True)
        self._kept = KeptProcesses(self._watch)
        self._spawner = Spawner(self._watch, base, launchers)
        self._wake, self._wake_writer = socket.socketpair()
        self._wake.setblocking(False)
        self._wake_writer.setblocking(False)
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        # A signal needs a Python handler to wake the event loop.
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        self._selector.register(requests, selectors.EVENT_READ, self._on_request)
        self._selector.register(self._wake, selectors.EVENT_READ, self._on_wake)

    def run(self) -> None:
        """Serve until the parent is gone."""
        while self._requests.fileno() >= 0:
            for key, _ in self._selector.select(self._timeout()):
                key.data()
            now = time.monotonic()
            is_due = self._kept.is_due(now)
            orphans = self._watch.check(now, set() if is_due else self._kept.directories)
            if is_due:
                self._kept.check(now, orphans)
        for process in list(self._watch.running.values()):
            self._watch.end(process, End.STOPPED)

    def _timeout(self) -> float | None:
        if not self._watch.running:
            return None
        return IDLE if self._kept and len(self._watch.running) == len(self._kept) else self._watch.seconds()

    def _on_wake(self) -> None:
        self._wake.recv(4096)
        self._watch.conclude_ended()

    def _on_request(self) -> None:
        data, fds = receive_with_fds(self._requests, 65536)
        if not data:
            self._selector.unregister(self._requests)
            self._requests.close()
            return
        unpacked = control.unpack(data, (Spawn, Keep, Take))
        del data  # a process forked below could read it
        match unpacked:
            case Spawn() as request:
                channel, control_end, page = fds
                if request.profile.group:
                    self._kept.end_all()
                self._spawner.spawn(request, channel, socket.socket(fileno=control_end), page)
            case Keep() as request:
                self._kept.keep(request, fds)
            case Take() as request:
                with socket.socket(fileno=fds[0]) as answer:
                    self._kept.hand_over(request, answer)


def main(requests: socket.socket, parent: int, uid: int | None) -> NoReturn:
    """Run a slot's fork server in a new child of ``parent``, with which it ends.

    Call this after :func:`.orphans.kill_leftovers` and :func:`harness.preload`. ``uid`` is the slot's uid for sealed
    processes.
    """
    os.setsid()
    linux.die_with(parent)()
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    linux.set_name("kq-forkserver")
    linux.keep_freed_memory()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # this process ends only with its parent
    logs.configure_early()
    # Imported libraries have threads, but none of them holds a lock while they are idle.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    # Triton 3.9 warns of a later default for each kernel that it compiles.
    warnings.filterwarnings("ignore", "TRITON_DEFAULT_FP_FUSION is unset", UserWarning)
    status = 1
    try:
        base = self_check.prepare(uid, os.environ.get("CUDA_VISIBLE_DEVICES"))
        # Entering a namespace can clear this setting.
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        triton_files = prewarm.prepare()
        gc.freeze()
        requests.send(json.dumps(base.report() | {"torch": torch.__version__}).encode())
        EventLoop(requests, base, triton_files).run()
        base.groups.close()
        status = 0
    except Exception as error:  # noqa: BLE001 -- no exception must reach the parent's frames
        _log.exception("the fork server failed")
        with contextlib.suppress(OSError):
            requests.send(json.dumps({"failed": f"{type(error).__name__}: {error}"[:1000]}).encode())
    finally:
        linux.leave(status)  # skips libraries' destructors, which would print errors
