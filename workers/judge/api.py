"""The judge as a library, without Redis, Celery or Postgres: it takes a request and returns an outcome.

A slot has one judge at a time. It is a separate process (:mod:`workers.judge.supervisor`) that serves one evaluation
after another, so that its CUDA context and its kernels are loaded before a request comes. It has no secrets and runs no
foreign code. It sends backend queries to the process that sent the request.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import kqueue
from kqueue.categories import Category
from kqueue.contract import Outcome, Phase, Request
from kqueue.folders import clean_environment
from workers.judge import deaths
from workers.judge.backend import JudgeBackend, answer
from workers.judge.channel.packets import send_with_fds
from workers.judge.forkserver.handle import ForkServer
from workers.judge.host import linux, toolchain
from workers.judge.host.status_page import StatusPage
from workers.judge.slot_config import SlotConfig

#: Seconds after which a judge supervisor that does not exit is killed.
_STOP_S: Final = 5.0
#: Seconds to wait for the exit of a judge supervisor or fork server that has closed its sockets.
_DYING_S: Final = 1.0


class Judges:
    """A handle on a slot's judges, of which one runs at a time. The parent of the supervisor owns it.

    Attributes:
        pid: the judge supervisor's pid.
        status_page: the page to which the judge writes each phase.
    """

    def __init__(
        self, forkserver: ForkServer, status_page: StatusPage | None = None, *, without: Sequence[int] = ()
    ) -> None:
        """Fork the judge supervisor, which forks the first judge. No thread of this process must hold a lock.

        Args:
            forkserver: the slot's fork server, which can still be starting.
            status_page: a page that other processes also read, or None for a private one.
            without: descriptors that the supervisor closes.
        """
        from workers.judge import supervisor

        self.forkserver = forkserver
        self.status_page = status_page or StatusPage()
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ended = False
        #: Number of evaluations started here that no worker has claimed.
        self._begun = 0
        #: True once the supervisor did not answer. It can still be exiting.
        self._gone = False
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            for descriptor in (*without, self._requests.fileno()):
                os.close(descriptor)
            supervisor.main(theirs, parent, self.status_page, forkserver)
        theirs.close()

    def judge(self, request: Request, slot: SlotConfig, backend: JudgeBackend, caches: str = "") -> Outcome:
        """Judge one request in the fork server's slot. The backend is used in this process.

        If this process is killed, the judge ends with all processes that it started. If the judge raises an exception,
        the outcome is ``judge_error``.

        Args:
            caches: a word that differs for the owners of evaluations, who share neither builds nor kept references. It
                is not a name, because the judge must not know whom it judges.

        Raises:
            JudgeDied: the judge or its supervisor died.
            Exception: the backend failed, and the judge was ended.
        """
        begins = self.status_page.attempt[1] == 0
        if begins:  # otherwise the worker has written the attempt that it claimed
            self._begun += 1
            self.status_page.open(UUID(int=0), self._begun)
        try:
            return self._converse(request, slot, backend, caches)
        finally:
            if begins:
                self.status_page.close()

    def _converse(self, request: Request, slot: SlotConfig, backend: JudgeBackend, caches: str) -> Outcome:
        killed_before = linux.out_of_memory_kills()
        builds = self.forkserver.builds
        evaluation_id, number = self.status_page.attempt
        call = {
            "attempt": [str(evaluation_id), number],
            "request": request.model_dump(mode="json"),
            "slot": slot.as_json(),
            "isolation": self.forkserver.isolation,
            "builds": builds.of(caches).as_json() if builds else None,
            "caches": caches,
        }
        ours, theirs = socket.socketpair()
        with ours, ours.makefile("rb") as replies:
            with theirs, suppress(ConnectionError):  # the supervisor has exited, which is detected below
                of_group = bool(slot.peers) and request.ranks > 1
                send_with_fds(self._requests, b"group" if of_group else b"judge", [theirs.fileno()])
            for line in _lines(ours, replies, call):
                message = json.loads(line)
                if "outcome" in message:
                    return Outcome.model_validate(message["outcome"])
                if "died" in message:
                    starved = linux.out_of_memory_kills() > killed_before
                    raise deaths.JudgeDied(deaths.explain(message["died"], self._phase(), out_of_memory=starved))
                # A judge that only makes static checks sends no queries, so the task process is not used up.
                self.status_page.use()
                answered = answer(backend, message["asked"])
                with suppress(ConnectionError):  # the judge has died, which the next line reports
                    _send(ours, answered=answered)
        self._gone = self._ends()
        who = "the process that forks judges is gone, and the judge with it" if self._gone else "the judge ended"
        raise deaths.JudgeDied(Outcome(category=Category.WORKER_LOST, message=who, phase=self._phase()))

    def _ends(self) -> bool:
        """Return whether the supervisor or fork server exits within a moment: a large process takes time to exit."""
        deadline = time.monotonic() + _DYING_S
        while self.work() and time.monotonic() < deadline:
            time.sleep(0.005)
        return not self.work()

    def _phase(self) -> Phase | None:
        """Return the judge's last phase, or None before the first."""
        record = self.status_page.find(self.status_page.attempt[0])
        return record.phase if record else None

    def wait_ready(self, minimum: str = "none") -> None:
        """Wait until requests can be judged (:meth:`ForkServer.wait_ready`)."""
        self.forkserver.wait_ready(minimum)

    @cached_property
    def conditions(self) -> str:
        """Hash of the seal, the toolchain, and the code of the judge and of ``kqueue``.

        Together with the request and its environment, these determine a verdict. Computing the hash takes up to a
        second, and it is constant for the lifetime of this handle.
        """
        builds = self.forkserver.builds
        code = (*Path(__file__).parent.rglob("*.py"), *Path(kqueue.__file__).parent.glob("*.py"))
        facts = [
            self.forkserver.isolation,
            builds.fingerprint if builds else toolchain.fingerprint(clean_environment(os.environ)),
            [hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(code)],
        ]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def alive(self) -> bool:
        """Return True if requests can be judged. Only for the supervisor's parent."""
        if not self._ended:
            self._ended = os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
        return not self._ended and not self._gone and self.forkserver.alive()

    def work(self) -> bool:
        """Return True if supervisor and fork server run. For any process."""
        return not self._gone and not linux.is_zombie(self.pid) and not linux.is_zombie(self.forkserver.pid)

    def stop(self) -> None:
        """End supervisor, judge and fork server within a bounded time. Only for their parent."""
        self.leave()
        self.forkserver.stop()

    def leave(self) -> None:
        """End the supervisor and its judge, but not the fork server. Only for the supervisor's parent."""
        self._requests.close()
        deadline = time.monotonic() + _STOP_S
        while not self._ended:
            self._ended = os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
            if time.monotonic() > deadline:
                with suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.002)


#: Handle on the judges of this process, if it is a slot's worker.
started: Judges | None = None


def _lines(conversation: socket.socket, replies: BufferedReader, call: dict[str, Any]) -> Iterator[bytes]:
    """Send the request, and yield the lines of the answer until the other side closes the socket."""
    with suppress(ConnectionError):  # the judge has died, and the supervisor can have reported it already
        _send(conversation, **call)
    while True:
        try:
            line = replies.readline()
        except ConnectionError:
            return
        if not line:
            return
        yield line


def _send(conversation: socket.socket, **message: Any) -> None:
    # Not through a buffered file: closing it would flush again, and fail if the judge has died meanwhile.
    conversation.sendall(json.dumps(message).encode() + b"\n")
