"""A place's seat: the process that forks the place's judges, one after the other, and the judge that sits there.

The seat is forked before its parent reads any secret, with torch loaded and CUDA untouched. The judge opens the device
at once, loads its kernels, and waits. It serves one evaluation after another, as nothing foreign runs in it. What must
be fresh for each evaluation is: the candidate, its context, the seeds, the inputs and the answers. After each the judge
gives back all that it holds. It makes room for another judge where it has not become what it was, has served for long,
or the fleet has failed.

Each evaluation is a conversation on a socket of its own, in lines of JSON, between the judge and whoever asks for it
(:class:`workers.judge.api.Judges`). The seat holds the judge's end too: it tells of a judge that died, and ends a judge
whose asker is gone.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import time
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, NoReturn, Self, cast
from uuid import UUID

import structlog
import torch

from kqueue import logs
from kqueue.categories import Blame, Category
from kqueue.contract import Outcome, Request, Settings
from workers.judge import deaths
from workers.judge.backend import RemoteBackend
from workers.judge.channel import gpu_memory
from workers.judge.channel.packets import receive_with_fds, send_with_fds
from workers.judge.forkserver.handle import ForkServer
from workers.judge.gpu.devices import opened
from workers.judge.host import linux
from workers.judge.host.artifacts import Store
from workers.judge.host.exclusive import NoRoom, room
from workers.judge.host.status_page import StatusPage
from workers.judge.pipeline import answers, health
from workers.judge.pipeline.run import evaluate
from workers.judge.slot_config import SlotConfig

_log: Any = structlog.get_logger(__name__)

#: What a judge says to the seat: it has taken the conversation; the evaluation is over, and its asker may go.
_TAKEN: Final = b"taken"
_FREE: Final = b"free"
#: The status of a judge that has made room for another.
_MADE_ROOM: Final = 64
#: How many evaluations one judge serves.
_MOST_USES: Final = 256
#: What a judge may have come to hold since it began: descriptors, and bytes of the GPU's and of the host's memory.
_MORE_DESCRIPTORS: Final = 64
_MORE_GPU_BYTES: Final = 64 << 20
_MORE_HOST_BYTES: Final = 2 << 30
#: How long opening the device may take, in seconds; others may be opening it at the same time.
_OPEN_S: Final = 120.0
#: How long giving back what an evaluation has left may take, in seconds. A driver may hang in it.
_GIVE_BACK_S: Final = 30.0
#: The least time between forks of judges that nobody waits for, in seconds: one may die whenever it opens the device.
_PREWARM_S: Final = 5.0


def main(requests: socket.socket, parent: int, status_page: StatusPage, forkserver: ForkServer) -> NoReturn:
    """Become a place's seat, in a process freshly forked by ``parent``.

    Args:
        requests: on which conversations come, each a packet with the judge's end beside it.
        parent: the process that forked this one, which ends with it.
        status_page: the judges'.
        forkserver: the place's.
    """
    status = 1
    try:
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        linux.set_name("kq-judge-super")
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number in (signal.SIGCHLD, signal.SIGALRM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # it ends when its parent does, not before
        logs.configure_early(slot=forkserver.slot.name)
        gc.freeze()
        gc.enable()
        _JudgeSupervisor(requests, status_page, forkserver).run()
        status = 0
    except BaseException:  # noqa: BLE001 -- nothing may return into the parent's frames
        _log.exception("the process that forks judges failed")
    finally:
        linux.leave(status)


class _JudgeSupervisor:
    """The loop that forks judges and watches over the one that sits."""

    def __init__(self, requests: socket.socket, status_page: StatusPage, forkserver: ForkServer) -> None:
        self._requests = requests
        self._status_page = status_page
        self._forkserver = forkserver
        self._poll = select.poll()
        self._poll.register(requests, select.POLLIN)
        self._judge: _Judge | None = None
        self._forked = 0.0
        #: The conversation that the judge has, and the one that waits for the next judge.
        self._now: socket.socket | None = None
        self._next: socket.socket | None = None
        #: Whether the judge has taken the one that it has; and whether one before it has died without.
        self._is_taken = False
        self._was_left = False

    def run(self) -> None:
        """Serve until the parent is gone."""
        self._fork()
        while True:
            ready = {descriptor for descriptor, _ in self._poll.poll()}
            # One at a time, as what comes of it may close others' descriptors and give their numbers to new ones. The
            # judge first: it says that it is free before its asker can go, or ask again.
            if self._judge is not None and self._judge.words.fileno() in ready:
                self._hear(self._judge)
            elif self._judge is not None and self._judge.pidfd in ready:
                self._bury(self._judge)
            elif self._now is not None and self._now.fileno() in ready:
                self._end()
            elif not self._take():
                return

    def _take(self) -> bool:
        """Take a conversation; return False if the parent is gone."""
        data, descriptors = receive_with_fds(self._requests, 64)
        if not data:
            return False
        self._next = socket.socket(fileno=descriptors[0])
        if self._now is not None:
            self._end()  # there is one at a time, so its asker is gone
        elif self._judge is None:
            self._fork()
        self._begin_next()
        return True

    def _begin_next(self) -> None:
        """Give the judge the conversation that waits, unless the judge is dying."""
        judge = self._judge
        if self._next is None or judge is None or judge.dying:
            return
        self._now, self._next, self._is_taken = self._next, None, False
        self._poll.register(self._now, 0)  # what the asker says is the judge's to read; only its end is seen here
        with contextlib.suppress(OSError):  # it has died, and is buried soon
            send_with_fds(judge.words, b"judge", [self._now.fileno()])

    def _forget(self) -> None:
        self._was_left = False
        if self._now is not None:
            self._poll.unregister(self._now)
            self._now.close()
            self._now = None

    def _end(self) -> None:
        """Have the judge die, as its asker is gone. That may take long: a driver may hold it."""
        self._forget()
        assert self._judge is not None
        self._judge.dying = True
        os.kill(self._judge.pid, signal.SIGKILL)

    def _hear(self, judge: _Judge) -> None:
        said = b""
        with contextlib.suppress(ConnectionResetError):  # it has left, and has not listened to what it was told
            said = judge.words.recv(64)
        if said == _TAKEN:
            self._is_taken = True
        elif said == _FREE:
            self._forget()
        else:
            self._poll.unregister(judge.words)  # it is dying

    def _bury(self, judge: _Judge) -> None:
        """Tell how the judge has ended; have another."""
        _, status = os.waitpid(judge.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if self._now is not None and not self._is_taken and (code == _MADE_ROOM or not self._was_left):
            # It was asked while it was leaving, or dying of what came before, and has not listened.
            self._poll.unregister(self._now)
            self._now, self._next = None, self._now
            self._was_left = code != _MADE_ROOM
        elif self._now is not None:
            with contextlib.suppress(OSError):
                self._now.sendall(json.dumps({"died": code}).encode() + b"\n")
            self._forget()
        with contextlib.suppress(KeyError):
            self._poll.unregister(judge.words)
        self._poll.unregister(judge.pidfd)
        judge.words.close()
        os.close(judge.pidfd)
        self._judge = None
        if self._next is not None or time.monotonic() > self._forked + _PREWARM_S:
            self._fork()
            self._begin_next()

    def _fork(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        seat = os.getpid()
        pid = os.fork()
        if pid == 0:
            for other in (ours, self._requests, self._next):
                if other is not None:
                    other.close()
            _become_judge(theirs, seat, self._status_page, self._forkserver)
        theirs.close()
        self._judge = _Judge(pid, os.pidfd_open(pid), ours)
        self._forked = time.monotonic()
        self._poll.register(ours, select.POLLIN)
        self._poll.register(self._judge.pidfd, select.POLLIN)


@dataclass(slots=True)
class _Judge:
    """The judge that sits, as the seat sees it.

    Attributes:
        pid, pidfd: the process.
        words: the socket between it and the seat.
        dying: True once it was killed.
    """

    pid: int
    pidfd: int
    words: socket.socket
    dying: bool = False


def _become_judge(words: socket.socket, seat: int, status_page: StatusPage, forkserver: ForkServer) -> NoReturn:
    """In the child: judge until there is to be another judge."""
    status = 1
    try:
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != seat:
            os._exit(1)
        linux.set_name("kq-judge")
        linux.keep_freed_memory()  # until the evaluation's end: see _give_back
        status = _sit(words, status_page, forkserver)
    except BaseException:  # noqa: BLE001 -- nothing may return into the seat's frames
        _log.exception("the judge failed beyond its evaluation")
    finally:
        linux.leave(status)


def _sit(words: socket.socket, status_page: StatusPage, forkserver: ForkServer) -> int:
    """Serve one conversation after another. Return the exit status."""
    with contextlib.ExitStack() as stack:
        if forkserver.slot.on_gpu:
            _open_device()
            with contextlib.suppress(Exception):  # held open, NVML answers later questions at once
                stack.enter_context(opened(forkserver.slot.device))
        at_first = _Holdings.now()
        for _ in range(_MOST_USES):
            data, descriptors = receive_with_fds(words, 64)
            if not data:
                return 0
            words.send(_TAKEN)
            is_well = False
            with (
                contextlib.suppress(ConnectionError),  # its asker is gone
                socket.socket(fileno=descriptors[0]) as asker,
                asker.makefile("rwb") as conversation,
            ):
                is_well = _converse(cast("BinaryIO", conversation), words, status_page, forkserver)
            signal.setitimer(signal.ITIMER_REAL, _GIVE_BACK_S)
            if not is_well or not _give_back():
                break
            if more := _Holdings.now().beyond(at_first):
                _log.warning("a judge makes room for another", holds=more)
                break
            signal.setitimer(signal.ITIMER_REAL, 0)
    return _MADE_ROOM


def _open_device() -> None:
    """Open the GPU and load the judge's own kernels. What is wrong with the GPU, an evaluation will tell."""
    signal.setitimer(signal.ITIMER_REAL, _OPEN_S)
    with contextlib.suppress(Exception):
        torch.cuda.synchronize()
        answers.warm_up(Settings())
        health.test()
    signal.setitimer(signal.ITIMER_REAL, 0)


def _converse(conversation: BinaryIO, words: socket.socket, status_page: StatusPage, forkserver: ForkServer) -> bool:
    """Judge one request; return False if the fleet has failed."""
    asked = json.loads(conversation.readline())
    request, slot = Request.model_validate(asked["request"]), SlotConfig.from_json(asked["slot"])
    evaluation_id, number = UUID(asked["attempt"][0]), asked["attempt"][1]
    status_page.judge(evaluation_id, number)
    # One that no worker has claimed has no id.
    about = {"evaluation": str(evaluation_id), "attempt": number} if evaluation_id.int else {}
    forkserver.about = {"slot": slot.name, **about}
    structlog.contextvars.unbind_contextvars("evaluation", "attempt")
    structlog.contextvars.bind_contextvars(**about)  # until the next one: what comes of it is logged after its end too
    forkserver.isolation = asked["isolation"]
    forkserver.builds = Store(*asked["builds"]) if asked["builds"] else None

    def ask(what: list[Any]) -> Any:
        _say(conversation, asked=what)
        return json.loads(conversation.readline())["answered"]

    told: dict[str, Any] = {}

    def judge() -> Outcome:
        try:
            # Held by this process and by no other: it ends with what may use the device, also where that takes long.
            with room(slot.lock, alone=slot.alone):
                outcome = evaluate(request, slot, RemoteBackend(ask), status_page, forkserver)
        except NoRoom as error:
            outcome = Outcome(category=Category.JUDGE_ERROR, message=str(error))
        told.update(outcome.model_dump(mode="json"))
        return outcome

    outcome = deaths.outcome_of(judge)
    told = told or outcome.model_dump(mode="json")
    words.send(_FREE)
    _say(conversation, outcome=told)
    return outcome.blame is not Blame.FLEET


def _say(conversation: BinaryIO, **words: Any) -> None:
    conversation.write(json.dumps(words).encode() + b"\n")
    conversation.flush()


def _give_back() -> bool:
    """Give back what the evaluation has left; return False if the device does not obey any more."""
    try:
        gpu_memory.close_all()
        gc.collect()
        linux.give_freed_memory_back()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except (torch.AcceleratorError, gpu_memory.CudaCallError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Holdings:
    """What a judge holds: descriptors, bytes of the GPU's memory by torch's count, and of the host's."""

    descriptors: int
    gpu_bytes: int
    host_bytes: int

    @classmethod
    def now(cls) -> Self:
        """Return what this process holds now."""
        gpu_bytes = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
        return cls(len(os.listdir("/proc/self/fd")), gpu_bytes, linux.memory_bytes(os.getpid()))  # noqa: PTH208

    def beyond(self, first: _Holdings) -> str:
        """Return what this is too much more of than at first, in words; an empty text if of nothing."""
        found = (
            (self.descriptors - first.descriptors, _MORE_DESCRIPTORS, "descriptors"),
            (self.gpu_bytes - first.gpu_bytes, _MORE_GPU_BYTES, "bytes of the GPU's memory"),
            (self.host_bytes - first.host_bytes, _MORE_HOST_BYTES, "bytes of the host's memory"),
        )
        return ", ".join(f"{more} more {what}" for more, most, what in found if more > most)
