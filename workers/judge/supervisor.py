"""The judge supervisor, a process that forks a slot's judges one after another, and the judge process.

The supervisor is forked before its parent reads any secret, with torch loaded and CUDA untouched. The judge opens the
device at once, loads its kernels, and waits. It serves one evaluation after another, because no foreign code runs in
it. The candidate, its CUDA context, the seeds, the inputs and the outputs are new for each evaluation. After each
evaluation the judge frees all its resources. A new judge replaces it if resources remain, after a number of
evaluations, and after a failure of the fleet.

Each evaluation has a socket on which judge and requester (:class:`workers.judge.api.Judges`) exchange lines of JSON.
The supervisor holds the judge's end too. It reports the death of a judge to the requester, and ends a judge whose
requester is gone.
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
from workers.judge.host.exclusive import NoRoom, rooms
from workers.judge.host.scratch import device_lock
from workers.judge.host.status_page import StatusPage
from workers.judge.pipeline import answers, health
from workers.judge.pipeline.run import evaluate
from workers.judge.slot_config import SlotConfig

_log: Any = structlog.get_logger(__name__)

#: Message of a judge to the supervisor: it has accepted the conversation.
_TAKEN: Final = b"taken"
#: Message of a judge to the supervisor: the evaluation is over, and the requester's end can close.
_FREE: Final = b"free"
#: Exit status of a judge that wants to be replaced.
_MADE_ROOM: Final = 64
#: Number of evaluations after which a judge is replaced.
_MOST_USES: Final = 256
#: Numbers of descriptors, bytes of GPU memory and bytes of host memory that a judge can gain before it is replaced.
_MORE_DESCRIPTORS: Final = 64
_MORE_GPU_BYTES: Final = 64 << 20
_MORE_HOST_BYTES: Final = 2 << 30
#: Time limit in seconds for opening the device. Other processes can be opening it at the same time.
_OPEN_S: Final = 120.0
#: Time limit in seconds for freeing an evaluation's resources. A driver can hang during that.
_GIVE_BACK_S: Final = 30.0
#: Minimum seconds between forks of judges without a waiting request. A judge can die each time it opens the device.
_PREWARM_S: Final = 5.0


def main(requests: socket.socket, parent: int, status_page: StatusPage, forkserver: ForkServer) -> NoReturn:
    """Run a slot's judge supervisor in a new child of ``parent``, with which it ends.

    Each packet on ``requests`` is a conversation. Its descriptor is the judge's end of a socket.
    """
    status = 1
    try:
        linux.die_with(parent)()
        linux.set_name("kq-judge-super")
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number in (signal.SIGCHLD, signal.SIGALRM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # this process ends only with its parent
        logs.configure_early(slot=forkserver.slot.name)
        gc.freeze()
        gc.enable()
        _JudgeSupervisor(requests, status_page, forkserver).run()
        status = 0
    except BaseException:  # noqa: BLE001 -- no exception must reach the parent's frames
        _log.exception("the judge supervisor failed")
    finally:
        linux.leave(status)


class _JudgeSupervisor:
    """The loop that forks judges and watches the current one."""

    def __init__(self, requests: socket.socket, status_page: StatusPage, forkserver: ForkServer) -> None:
        self._requests = requests
        self._status_page = status_page
        self._forkserver = forkserver
        self._poll = select.poll()
        self._poll.register(requests, select.POLLIN)
        self._judge: _Judge | None = None
        self._forked = 0.0
        #: The current judge's conversation.
        self._now: socket.socket | None = None
        #: The conversation that waits for the next judge.
        self._next: socket.socket | None = None
        #: True once the judge has accepted its conversation.
        self._is_taken = False
        #: True if an earlier judge died before it accepted the same conversation.
        self._was_left = False
        #: True if the waiting conversation needs a judge of a group.
        self._of_group = False

    def run(self) -> None:
        """Serve until the parent is gone."""
        self._fork()
        while True:
            ready = {descriptor for descriptor, _ in self._poll.poll()}
            # Handle one event at a time, because a handler can close other ready descriptors and reuse their numbers.
            # The judge comes first: it sends _FREE before its requester can exit or send the next request.
            if self._judge is not None and self._judge.channel.fileno() in ready:
                self._on_message(self._judge)
            elif self._judge is not None and self._judge.pidfd in ready:
                self._on_exit(self._judge)
            elif self._now is not None and self._now.fileno() in ready:
                self._kill_judge()
            elif not self._on_request():
                return

    def _on_request(self) -> bool:
        """Receive a conversation. Return False if the parent is gone."""
        data, descriptors = receive_with_fds(self._requests, 64)
        if not data:
            return False
        self._next, self._of_group = socket.socket(fileno=descriptors[0]), data == b"group"
        if self._now is not None or (self._judge is not None and self._judge.of_group is not self._of_group):
            self._kill_judge()  # there is one requester at a time, so the earlier one is gone
        elif self._judge is None:
            self._fork()
        self._begin_next()
        return True

    def _begin_next(self) -> None:
        """Send the waiting conversation to the judge, unless the judge is dying."""
        judge = self._judge
        if self._next is None or judge is None or judge.dying:
            return
        self._now, self._next, self._is_taken = self._next, None, False
        self._poll.register(self._now, 0)  # detects only the end, because the judge reads the data
        with contextlib.suppress(OSError):  # the judge has died, and its pidfd reports that soon
            send_with_fds(judge.channel, b"judge", [self._now.fileno()])

    def _forget(self) -> None:
        self._was_left = False
        if self._now is not None:
            self._poll.unregister(self._now)
            self._now.close()
            self._now = None

    def _kill_judge(self) -> None:
        """Kill the judge, because its requester is gone. Its exit can take long if a driver holds it."""
        self._forget()
        assert self._judge is not None
        self._judge.dying = True
        os.kill(self._judge.pid, signal.SIGKILL)

    def _on_message(self, judge: _Judge) -> None:
        message = b""
        with contextlib.suppress(ConnectionResetError):  # the judge exited without reading the last conversation
            message = judge.channel.recv(64)
        if message == _TAKEN:
            self._is_taken = True
        elif message == _FREE:
            self._forget()
        else:
            self._poll.unregister(judge.channel)  # the judge is dying

    def _on_exit(self, judge: _Judge) -> None:
        """Report the judge's exit to the requester, and fork another judge."""
        _, status = os.waitpid(judge.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if self._now is not None and not self._is_taken and (code == _MADE_ROOM or not self._was_left):
            # The judge was already exiting, or dying of an earlier event. The next judge gets the conversation.
            self._poll.unregister(self._now)
            self._now, self._next, self._of_group = None, self._now, judge.of_group
            self._was_left = code != _MADE_ROOM
        elif self._now is not None:
            with contextlib.suppress(OSError):
                self._now.sendall(json.dumps({"died": code}).encode() + b"\n")
            self._forget()
        with contextlib.suppress(KeyError):
            self._poll.unregister(judge.channel)
        self._poll.unregister(judge.pidfd)
        judge.channel.close()
        os.close(judge.pidfd)
        self._judge = None
        if self._next is not None or time.monotonic() > self._forked + _PREWARM_S:
            self._fork()
            self._begin_next()

    def _fork(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            for other in (ours, self._requests, self._next):
                if other is not None:
                    other.close()
            _become_judge(theirs, parent, self._status_page, self._forkserver, of_group=self._of_group)
        theirs.close()
        self._judge, self._of_group = _Judge(pid, os.pidfd_open(pid), ours, self._of_group), False
        self._forked = time.monotonic()
        self._poll.register(ours, select.POLLIN)
        self._poll.register(self._judge.pidfd, select.POLLIN)


@dataclass(slots=True)
class _Judge:
    """The supervisor's state of the current judge. ``channel`` is the socket between both.

    ``of_group`` is True if it is for a group, and opens several GPUs.
    """

    pid: int
    pidfd: int
    channel: socket.socket
    of_group: bool
    dying: bool = False


def _become_judge(
    channel: socket.socket, parent: int, status_page: StatusPage, forkserver: ForkServer, *, of_group: bool
) -> NoReturn:
    """Run a judge in a process forked by the supervisor, and exit. One for a group serves one conversation."""
    status = 1
    try:
        linux.die_with(parent)()
        linux.set_name("kq-judge")
        linux.keep_freed_memory()  # until the evaluation's end: see _free_resources
        status = _serve(channel, status_page, forkserver, of_group=of_group)
    except BaseException:  # noqa: BLE001 -- no exception must reach the supervisor's frames
        _log.exception("the judge failed outside an evaluation")
    finally:
        linux.leave(status)


def _serve(channel: socket.socket, status_page: StatusPage, forkserver: ForkServer, *, of_group: bool) -> int:
    """Serve one conversation after another. Return the exit status."""
    with contextlib.ExitStack() as stack:
        if forkserver.slot.on_gpu:
            if not of_group:  # The request names the GPUs to open.
                _open_device()
            with contextlib.suppress(Exception):  # NVML stays open, so that later queries return at once
                stack.enter_context(opened(forkserver.slot.device))
        initial = _Resources.now()
        for _ in range(1 if of_group else _MOST_USES):
            data, descriptors = receive_with_fds(channel, 64)
            if not data:
                return 0
            channel.send(_TAKEN)
            is_healthy = False
            with (
                contextlib.suppress(ConnectionError),  # the requester is gone
                socket.socket(fileno=descriptors[0]) as requester,
                requester.makefile("rwb") as conversation,
            ):
                is_healthy = _converse(cast("BinaryIO", conversation), channel, status_page, forkserver)
            signal.setitimer(signal.ITIMER_REAL, _GIVE_BACK_S)
            if not is_healthy or not _free_resources():
                break
            if excess := _Resources.now().excess_over(initial):
                _log.warning("the judge has kept resources and is replaced", holds=excess)
                break
            signal.setitimer(signal.ITIMER_REAL, 0)
    return _MADE_ROOM


def _open_device() -> None:
    """Open the GPU and load the judge's kernels. Ignore errors, because an evaluation will report them."""
    signal.setitimer(signal.ITIMER_REAL, _OPEN_S)
    with contextlib.suppress(Exception):
        torch.cuda.synchronize()
        answers.warm_up(Settings())
        health.test()
    signal.setitimer(signal.ITIMER_REAL, 0)


def _converse(conversation: BinaryIO, channel: socket.socket, status_page: StatusPage, forkserver: ForkServer) -> bool:
    """Judge one request. Return False if the fleet has failed."""
    call = json.loads(conversation.readline())
    request, slot = Request.model_validate(call["request"]), SlotConfig.from_json(call["slot"])
    evaluation_id, number = UUID(call["attempt"][0]), call["attempt"][1]
    status_page.judge(evaluation_id, number)
    # An evaluation that no worker has claimed has the id 0.
    about = {"evaluation": str(evaluation_id), "attempt": number} if evaluation_id.int else {}
    forkserver.about = {"slot": slot.name, **about}
    structlog.contextvars.unbind_contextvars("evaluation", "attempt")
    structlog.contextvars.bind_contextvars(**about)  # until the next evaluation, to also mark log lines after the end
    forkserver.isolation = call["isolation"]
    forkserver.caches = call["caches"]
    forkserver.builds = Store(*call["builds"]) if call["builds"] else None

    def ask(question: list[Any]) -> Any:
        _send(conversation, asked=question)
        return json.loads(conversation.readline())["answered"]

    dumped: dict[str, Any] = {}

    def judge() -> Outcome:
        try:
            # Only this process holds the lock, so it is released when the judge exits. A driver can delay that exit
            # while the device is still in use.
            # A group books no memory, and holds all of its GPUs alone.
            ranks = request.ranks if slot.on_gpu else 0
            peers = slot.peers[: max(0, ranks - 1)]
            if peers:
                os.environ["CUDA_VISIBLE_DEVICES"] = ",".join((slot.device, *peers))
            locks = [slot.lock, *(device_lock(slot.lock.parents[1], peer) for peer in peers)]
            with rooms(locks, alone=slot.alone or ranks > 0):
                outcome = evaluate(request, slot, RemoteBackend(ask), status_page, forkserver)
        except NoRoom as error:
            outcome = Outcome(category=Category.JUDGE_ERROR, message=str(error))
        dumped.update(outcome.model_dump(mode="json"))
        return outcome

    outcome = deaths.outcome_of(judge)
    dumped = dumped or outcome.model_dump(mode="json")
    channel.send(_FREE)
    _send(conversation, outcome=dumped)
    return outcome.blame is not Blame.FLEET


def _send(conversation: BinaryIO, **message: Any) -> None:
    conversation.write(json.dumps(message).encode() + b"\n")
    conversation.flush()


def _free_resources() -> bool:
    """Free the resources of the evaluation. Return False if CUDA fails."""
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
class _Resources:
    """A judge's resources: number of descriptors, bytes of GPU memory as counted by torch, bytes of host memory."""

    descriptors: int
    gpu_bytes: int
    host_bytes: int

    @classmethod
    def now(cls) -> Self:
        """Return the resources of this process."""
        gpu_bytes = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
        return cls(len(os.listdir("/proc/self/fd")), gpu_bytes, linux.memory_bytes(os.getpid()))  # noqa: PTH208

    def excess_over(self, initial: _Resources) -> str:
        """Return a text of the increases that exceed their limits, or an empty text."""
        increases = (
            (self.descriptors - initial.descriptors, _MORE_DESCRIPTORS, "descriptors"),
            (self.gpu_bytes - initial.gpu_bytes, _MORE_GPU_BYTES, "bytes of GPU memory"),
            (self.host_bytes - initial.host_bytes, _MORE_HOST_BYTES, "bytes of host memory"),
        )
        return ", ".join(f"{increase} more {name}" for increase, limit, name in increases if increase > limit)
