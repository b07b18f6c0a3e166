"""The judge's handle on a candidate's process."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import socket
import time
from functools import cached_property
from typing import Any, Final

from kqueue.categories import Category
from kqueue.contract import Phase
from workers.judge.channel import flags
from workers.judge.channel.protocol import (
    Answer,
    Order,
    ProtocolError,
    Reply,
    Tag,
    receive_reply,
    send_command,
)
from workers.judge.channel.semaphores import Semaphores
from workers.judge.keeper.handle import ForkServer, ForkServerError
from workers.judge.keeper.report import Report
from workers.judge.sandbox.seal import Profile
from workers.judge.trial.ending import EvaluationEnded

#: Seconds beyond a deadline after which the fork server itself is taken to have failed.
_GRACE_S: Final = 30.0
#: CUDA's codes that say a launch asked for too much: invalid value (too much dynamic shared memory),
#: invalid configuration (too many threads), launch out of resources (registers).
_TOO_MUCH: Final = frozenset({1, 9, 701})
_ILLEGAL_ADDRESS: Final = 700
_REASONS: Final = {
    "memory": Category.HOST_OUT_OF_MEMORY,
    "output": Category.OUTPUT_LIMIT,
    "scratch": Category.OUTPUT_LIMIT,
}


class CandidateProcess:
    """One candidate, from its fork to its report.

    Every order either returns the candidate's reply or raises :class:`EvaluationEnded` with what became of
    it. ``ended`` is the fork server's report once the process is gone.
    """

    def __init__(self, forkserver: ForkServer, profile: Profile, compile_s: float) -> None:
        """Have the candidate forked; it waits for orders.

        Args:
            forkserver: the slot's.
            profile: its bounds.
            compile_s: what compilers may take in all its phases together, in seconds.

        Raises:
            ForkServerError: the fork server is gone.
        """
        self.ended: Report | None = None
        self._forkserver = forkserver
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        page = flags.create()
        try:
            forkserver.spawn(profile, theirs.fileno(), control.fileno(), page)
            self.flags = flags.attach(page)
        finally:
            theirs.close()
            control.close()
            os.close(page)
        self._sequence = itertools.count(1)
        self._phase = Phase.LOAD
        self._seconds = 0.0
        self._compile_s = compile_s
        self._tell({"compile": compile_s})

    @cached_property
    def semaphores(self) -> Semaphores:
        """The page of flags as the judge's streams see it.

        Raises:
            CudaCallError: the driver refuses.
        """
        return Semaphores(self.flags)

    def enter(self, phase: Phase, seconds: float) -> None:
        """Begin a phase. Its clock runs between :meth:`start_clock` and :meth:`stop_clock`."""
        self._phase, self._seconds = phase, seconds
        self._tell({"phase": str(phase), "seconds": seconds})

    def charge_compilers(self, seconds: float) -> None:
        """Take from what compilers may use: another process has compiled for this one."""
        self._compile_s = max(self._compile_s - seconds, 0.0)
        self._tell({"compile": self._compile_s})

    def start_clock(self) -> None:
        """The candidate is at work: what overstays the phase's deadline is ended by the fork server."""
        self._tell({"running": True})

    def stop_clock(self) -> None:
        """The judge is at work; the candidate waits."""
        self._tell({"running": False})

    def order(self, order: Order, **arguments: Any) -> Reply:
        """Give an order, on the phase's clock, and wait for its reply."""
        self.start_clock()
        reply = self.receive(self.send(order, **arguments))
        self.stop_clock()
        return reply

    def send(self, order: Order, *, seed: int = 0, payload: Any = None, fds: tuple[int, ...] = ()) -> int:
        """Give an order without waiting; returns its number."""
        sequence = next(self._sequence)
        try:
            send_command(self._channel, order, sequence, seed=seed, payload=payload, fds=fds)
        except OSError:
            raise self.died() from None
        return sequence

    def receive(self, sequence: int) -> Reply:
        """Wait for the reply to an order.

        Raises:
            EvaluationEnded: the candidate raised, died, was ended, or answered nonsense.
            ForkServerError: nobody ended it although its time was up.
        """
        allowed = self._seconds + self._compile_s + _GRACE_S
        ready, _, _ = select.select([self._channel, self._control], [], [], allowed)
        if not ready:
            self._forkserver.kill()
            raise ForkServerError("the fork server did not end a candidate that was beyond its deadline")
        if self._channel not in ready:
            raise self.died()
        try:
            reply = receive_reply(self._channel)
        except (ProtocolError, OSError) as error:
            self.stop()
            raise EvaluationEnded(
                Category.SANDBOX_VIOLATION, f"the candidate wrote to the judge's channel: {error}", self._phase
            ) from None
        if reply is None:
            raise self.died()
        if reply.answer is Answer.RAISED:
            # Also of the order before: what was enqueued ahead fails after it was answered.
            raise self._raised(reply)
        if reply.sequence != sequence:
            self.stop()
            raise EvaluationEnded(
                Category.SANDBOX_VIOLATION, "the candidate answered an order that was not given", self._phase
            )
        return reply

    def answered(self, seconds: float = 0) -> bool:
        """Whether a reply waits to be received, or the process has ended, within ``seconds``."""
        return bool(select.select([self._channel, self._control], [], [], seconds)[0])

    def stop(self) -> Report:
        """End the process if it lives, and return the fork server's report.

        Raises:
            ForkServerError: no report came.
        """
        if self.ended is None:
            self._tell({"stop": True})
            self._await_report()
        assert self.ended is not None
        return self.ended

    def _tell(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it has ended; its report is waiting
            self._control.send(json.dumps(message).encode())

    def _await_report(self) -> None:
        data = b""
        deadline = time.monotonic() + _GRACE_S
        while not data and select.select([self._control], [], [], max(0.0, deadline - time.monotonic()))[0]:
            try:
                data = self._control.recv(1 << 20)
                break
            except ConnectionResetError:
                continue  # said once where a message of ours was not read; the report comes after it
        if not data:
            self._forkserver.kill()
            raise ForkServerError("the fork server did not report how a candidate ended")
        self.ended = Report(**json.loads(data))
        self._channel.close()
        self._control.close()

    def _raised(self, reply: Reply) -> EvaluationEnded:
        """What an exception in the candidate comes to, by its type's tag, CUDA's code and the phase."""
        facts = {"exception": reply.exception, "cuda_code": reply.code or None}
        message = f"{reply.exception}: {reply.message}"
        return EvaluationEnded(_category(reply, self._phase), message, self._phase, **facts)

    def died(self) -> EvaluationEnded:
        """What the end of the process comes to, by the fork server's report."""
        if self.ended is None:
            self._tell({"closed": True})
            self._await_report()
        ended = self.ended
        assert ended is not None
        if ended.reason == "unsealed":
            raise ForkServerError(f"a candidate could not be sealed: {ended.log}")
        facts = {"reason": ended.reason, "status": ended.status, "peak_bytes": ended.peak_bytes}
        if ended.reason == "deadline":
            phase = Phase(ended.phase)
            category = Category.COMPILE_TIMEOUT if phase is Phase.COMPILE else Category.TIMEOUT
            return EvaluationEnded(category, f"the {phase} phase did not end within its deadline", phase, **facts)
        if ended.reason in _REASONS:
            category = _REASONS[ended.reason]
            amounts = {"memory": ended.peak_bytes, "output": ended.output_bytes, "scratch": ended.scratch_bytes}
            what = f"{amounts[ended.reason]} bytes" + (", or too many files" if ended.reason == "scratch" else "")
            return EvaluationEnded(category, f"{ended.reason} limit exceeded: {what}", self._phase, **facts)
        if ended.reason == "closed":
            return EvaluationEnded(
                Category.SANDBOX_VIOLATION, "the candidate closed the judge's channel", self._phase, **facts
            )
        if ended.reason == "stuck" or ended.status is None:
            # It would be taken for what the next candidate left behind: the slot starts anew without it.
            self._forkserver.kill()
            raise ForkServerError("a candidate's process could not be ended: it hangs in the kernel or a driver")
        if os.WIFSIGNALED(ended.status):
            number = os.WTERMSIG(ended.status)
            name = signal.Signals(number).name if number in signal.valid_signals() else str(number)
            return EvaluationEnded(
                Category.CRASHED, f"the process was ended by {name}", self._phase, signal=name, **facts
            )
        code = os.WEXITSTATUS(ended.status)
        return EvaluationEnded(
            Category.CRASHED, f"the process exited with status {code}", self._phase, exit_status=code, **facts
        )


def _category(reply: Reply, phase: Phase) -> Category:
    by_tag = {
        Tag.ENTRY_POINT: Category.ENTRY_POINT_MISSING,
        Tag.COMPILE: Category.COMPILE_ERROR,
        Tag.HOST_MEMORY: Category.HOST_OUT_OF_MEMORY,
        Tag.GPU_MEMORY: Category.GPU_OUT_OF_MEMORY,
        Tag.RESOURCES: Category.LAUNCH_RESOURCES_EXCEEDED,
        Tag.EXIT: Category.CRASHED,
    }
    if reply.tag in by_tag:
        return by_tag[reply.tag]
    if reply.tag is Tag.CUDA or reply.code:
        if reply.code == _ILLEGAL_ADDRESS:
            return Category.ILLEGAL_MEMORY_ACCESS
        return Category.LAUNCH_RESOURCES_EXCEEDED if reply.code in _TOO_MUCH else Category.CUDA_ERROR
    return {Phase.LOAD: Category.IMPORT_ERROR, Phase.CONSTRUCT: Category.INIT_ERROR}.get(phase, Category.RUNTIME_ERROR)
