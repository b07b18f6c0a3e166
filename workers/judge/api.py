"""The judge as a library: a request in, an outcome out, with no service at all.

A place has one judge at a time. It is a process of its own (:mod:`workers.judge.supervisor`) that serves one evaluation
after another, so that its CUDA context and its kernels are there before a request is. It holds no secret, runs nothing
foreign, and asks whoever gave the request for all that is kept elsewhere.
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
from workers.judge import deaths
from workers.judge.backend import JudgeBackend, answer
from workers.judge.channel.packets import send_with_fds
from workers.judge.forkserver.handle import ForkServer, clean_environment
from workers.judge.host import linux, toolchain
from workers.judge.host.status_page import StatusPage
from workers.judge.slot_config import SlotConfig

#: How long the seat may take to end, in seconds.
_STOP_S: Final = 5.0
#: How long a seat may take to die that has closed its sockets, in seconds.
_DYING_S: Final = 1.0


class Judges:
    """A place's judges, one at a time: the handle that the parent of their seat holds, and its children inherit.

    Attributes:
        forkserver: the place's.
        pid: the seat, a child of the process that made this.
        status_page: told of each phase by the judge.
    """

    def __init__(
        self, forkserver: ForkServer, status_page: StatusPage | None = None, *, without: Sequence[int] = ()
    ) -> None:
        """Fork the seat, which forks the first judge. No thread of this process may hold a lock.

        Args:
            forkserver: the place's; it need not be ready yet.
            status_page: one that others read too; None for one of its own.
            without: descriptors that the seat must not have.
        """
        from workers.judge import supervisor

        self.forkserver = forkserver
        self.status_page = status_page or StatusPage()
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ended = False
        #: How many evaluations have begun that no worker has claimed.
        self._begun = 0
        #: Whether the seat did not answer; it may be dying still.
        self._gone = False
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            for descriptor in (*without, self._requests.fileno()):
                os.close(descriptor)
            supervisor.main(theirs, parent, self.status_page, forkserver)
        theirs.close()

    def judge(self, request: Request, slot: SlotConfig, backend: JudgeBackend) -> Outcome:
        """Judge one request. Whoever calls this may be killed: the judge ends then, and all that it had started.

        Args:
            request: what to judge.
            slot: where. Its device and uid are the fork server's.
            backend: where environments, baselines and doubts about a GPU are kept; used in this process.

        Returns:
            the outcome; of a judge that raised too.

        Raises:
            JudgeDied: the judge died, or its seat.
            Exception: the records failed; the judge was ended.
        """
        begins = self.status_page.attempt[1] == 0
        if begins:  # else its worker has recorded what it has claimed
            self._begun += 1
            self.status_page.open(UUID(int=0), self._begun)
        try:
            return self._converse(request, slot, backend)
        finally:
            if begins:
                self.status_page.close()

    def _converse(self, request: Request, slot: SlotConfig, backend: JudgeBackend) -> Outcome:
        killed_before = linux.out_of_memory_kills()
        builds = self.forkserver.builds
        evaluation_id, number = self.status_page.attempt
        asked = {
            "attempt": [str(evaluation_id), number],
            "request": request.model_dump(mode="json"),
            "slot": slot.as_json(),
            "isolation": self.forkserver.isolation,
            "builds": builds.as_json() if builds else None,
        }
        ours, theirs = socket.socketpair()
        with ours, ours.makefile("rb") as heard:
            with theirs, suppress(ConnectionError):  # the seat is gone, which shows below
                send_with_fds(self._requests, b"judge", [theirs.fileno()])
            for line in _lines(ours, heard, asked):
                told = json.loads(line)
                if "outcome" in told:
                    return Outcome.model_validate(told["outcome"])
                if "died" in told:
                    starved = linux.out_of_memory_kills() > killed_before
                    raise deaths.JudgeDied(deaths.explain(told["died"], self._phase(), out_of_memory=starved))
                self.status_page.use()  # what is settled by reading needs no records
                answered = answer(backend, told["asked"])
                with suppress(ConnectionError):  # it has died, and how is told next
                    _tell(ours, answered=answered)
        self._gone = self._ends()
        who = "the process that forks judges is gone, and the judge with it" if self._gone else "the judge ended"
        raise deaths.JudgeDied(Outcome(category=Category.WORKER_LOST, message=who, phase=self._phase()))

    def _ends(self) -> bool:
        """Return whether the seat has ended, or does so within a moment: a large process takes some time to die."""
        deadline = time.monotonic() + _DYING_S
        while self.work() and time.monotonic() < deadline:
            time.sleep(0.005)
        return not self.work()

    def _phase(self) -> Phase | None:
        """Return the phase that the judge was last in; None before the first."""
        record = self.status_page.find(self.status_page.attempt[0])
        return record.phase if record else None

    def wait_ready(self, minimum: str = "none") -> None:
        """Wait until evaluations can be judged, as :meth:`ForkServer.wait_ready`."""
        self.forkserver.wait_ready(minimum)

    @cached_property
    def conditions(self) -> str:
        """The hash of what a verdict depends on here beside what is asked for and its environment.

        It is the seal, the toolchain, and the judge's own code with what it takes from beside it. It takes up to a
        second, and is the same for as long as these judges live.
        """
        builds = self.forkserver.builds
        code = (*Path(__file__).parent.rglob("*.py"), *Path(kqueue.__file__).parent.glob("*.py"))
        known = [
            self.forkserver.isolation,
            builds.fingerprint if builds else toolchain.fingerprint(clean_environment(os.environ)),
            [hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(code)],
        ]
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()

    def alive(self) -> bool:
        """Return True if judges can be had. Only the seat's parent may ask."""
        if not self._ended:
            self._ended = os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
        return not self._ended and not self._gone and self.forkserver.alive()

    def work(self) -> bool:
        """Return True if seat and fork server run. Any process may ask."""
        return not self._gone and not linux.is_zombie(self.pid) and not linux.is_zombie(self.forkserver.pid)

    def stop(self) -> None:
        """End seat, judge and fork server, within a bounded time. Only their parent may ask."""
        self.leave()
        self.forkserver.stop()

    def leave(self) -> None:
        """End the seat and its judge, and leave the fork server to its owner. Only the seat's parent may ask."""
        self._requests.close()
        deadline = time.monotonic() + _STOP_S
        while not self._ended:
            self._ended = os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
            if time.monotonic() > deadline:
                with suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.002)


#: The judges that this process started, if it is a slot's worker.
started: Judges | None = None


def _lines(conversation: socket.socket, heard: BufferedReader, asked: dict[str, Any]) -> Iterator[bytes]:
    """Ask, and yield what is said until the other side is gone."""
    with suppress(ConnectionError):  # it has died, and how may have been told
        _tell(conversation, **asked)
    while True:
        try:
            line = heard.readline()
        except ConnectionError:
            return
        if not line:
            return
        yield line


def _tell(conversation: socket.socket, **words: Any) -> None:
    # Without a buffer, which would be written once more when it is closed, to whoever has died meanwhile.
    conversation.sendall(json.dumps(words).encode() + b"\n")
