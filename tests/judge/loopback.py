"""A sealed process replaced by a thread of the test: the same harness and channel, without fork server and seal."""

from __future__ import annotations

import socket
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from kqueue.contract import Settings
from workers.judge.candidate.harness import Harness, serve
from workers.judge.candidate.reference import ReferenceHarness
from workers.judge.channel import flags
from workers.judge.forkserver.process import SealedProcess
from workers.judge.pipeline.cases import Case
from workers.judge.pipeline.reference import BOUNDS, Bounds, Reference

#: Bounds of a CPU without its time limits, which a busy machine exceeds.
PATIENT = replace(BOUNDS["cpu"], quick_s=60.0, exact_s=600.0, larger_s=60.0)
#: Loopbacks that a test has started. A fixture ends them.
running: list[Loopback] = []


class Loopback(SealedProcess):
    """Obeys orders like a sealed process. Its code must end, because nothing kills it."""

    def __init__(self, kind: type[Harness] = ReferenceHarness) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control, self._unread = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)
        page = flags.create()
        self._directory = tempfile.TemporaryDirectory()
        place = Path(self._directory.name)
        arguments = (theirs, flags.attach(page), lambda view: kind(view, place))
        threading.Thread(target=serve, args=arguments, daemon=True).start()
        nobody: Any = None
        self._hold(nobody, "", ours, control, page, 60.0)
        running.append(self)

    def cpu_ns(self) -> int:
        return 0  # A thread has no CPU time that a fork server could report.


def reference(source: str, bounds: Bounds = PATIENT, **settings: Any) -> Reference:
    made = Reference(Loopback(), source, Settings.model_validate({"checks": 3, **settings}), "cpu", bounds)
    made.proxy.begin()
    made.proxy.load()
    made.proxy.construct(42 if made.settings.seed is None else made.settings.seed)
    made.oracle.widen()
    return made


def first_of(made: Reference) -> Case:
    first = made.cache.first()
    made.answer_first(first)
    return first
