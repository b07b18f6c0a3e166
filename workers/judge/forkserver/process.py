"""The judge's handle on a sealed process, such as a candidate, a reference or a builder."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import select
import signal
import socket
import time
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

from kqueue.categories import Category
from kqueue.contract import Deadlines, Phase
from kqueue.text import one_line
from workers.judge.channel import flags
from workers.judge.channel.buffers import Imports, ProcessMemory
from workers.judge.channel.orders import Order
from workers.judge.channel.packets import wait_briefly
from workers.judge.channel.protocol import Answer, Export, ProtocolError, Reply, Tag
from workers.judge.channel.semaphores import Semaphores
from workers.judge.channel.wire import receive_record, send_command
from workers.judge.ending import EvaluationEnded
from workers.judge.forkserver import control
from workers.judge.forkserver.control import Closed, Compilers, Count, Counted, End, Enter, Keep, Report, Stop, Turn
from workers.judge.forkserver.handle import ForkServer, ForkServerError
from workers.judge.host import linux, pauses
from workers.judge.sandbox.seal import Profile

#: Seconds after a deadline at which the fork server itself counts as failed.
_GRACE_S: Final = 30.0
#: Maximum seconds of one poll while waiting for a process. Pauses of the fleet are measured between polls.
_LOOK_S: Final = 0.25
#: CUDA's error codes for a launch that needs too many resources: invalid value (too much dynamic shared memory),
#: invalid configuration (too many threads), launch out of resources (registers).
_TOO_MUCH: Final = frozenset({1, 9, 701})
_ILLEGAL_ADDRESS: Final = 700
_REASONS: Final = {
    End.MEMORY: Category.HOST_OUT_OF_MEMORY,
    End.OUTPUT: Category.OUTPUT_LIMIT,
    End.SCRATCH: Category.OUTPUT_LIMIT,
}
#: Maximum share of the host's memory for one process. It must be ended before Linux runs out of memory, because the
#: fleet would be blamed for that.
HOST_SHARE: Final = 0.5
#: Bits that make a process's id the id of its CPU clock (`clock_getcpuclockid`).
_CPU_CLOCK: Final = 2
_SETTINGS: Final = {End.MEMORY: "host_memory_bytes", End.OUTPUT: "output_bytes", End.SCRATCH: "scratch_bytes"}


class SealedProcess:
    """One sealed process, from its fork to its report.

    Every order either returns the process's reply or raises :class:`EvaluationEnded` with the outcome.

    Attributes:
        ended: the fork server's report, once the process has ended.
        waited_s: seconds spent waiting for the process's replies, without pauses of the fleet.
        imports: the GPU memory that the process has shared.
        memory: the host memory of a process on a CPU, once the process has announced it.
        cpu_s: CPU time in seconds of the process and all its descendants under this judge, measured by trusted code.
            Set by :meth:`count` and at the end.
    """

    def __init__(self, forkserver: ForkServer, profile: Profile, compile_s: float) -> None:
        """Fork the process, which then waits for orders.

        Args:
            compile_s: time limit in seconds for compilers in all its phases together.

        Raises:
            ForkServerError: the fork server is gone.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control_end, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        page = flags.create()
        try:
            forkserver.spawn(profile, theirs.fileno(), control.fileno(), page)
        finally:
            theirs.close()
            control.close()
        self._hold(forkserver, profile.scratch, ours, control_end, page, compile_s)

    def _hold(
        self,
        forkserver: ForkServer,
        scratch: str,
        channel: socket.socket,
        control_end: socket.socket,
        page: int,
        compile_s: float,
    ) -> None:
        self.ended: Report | None = None
        self.imports = Imports()
        self.waited_s = 0.0
        self.memory: ProcessMemory | None = None
        self.cpu_s = 0.0
        self.flags = flags.attach(page)
        self._forkserver = forkserver
        self._scratch = scratch
        self._channel = channel
        self._control = control_end
        self._page = page
        self._sequence = itertools.count(1)
        self._phase = Phase.PREPARE
        self._seconds = 0.0
        self._gpu_s: float | None = None
        self._compile_s = compile_s
        self._cpu_before_s = 0.0
        self._clock: int | None = None
        self._notify(Compilers(compile_s))

    @classmethod
    def taken(
        cls,
        forkserver: ForkServer,
        scratch: str,
        descriptors: list[int],
        phase: Phase,
        *,
        compile_s: float,
        cpu_before_s: float = 0.0,
    ) -> Self:
        """Return a handle on a process that an earlier evaluation kept with :meth:`leave`.

        Args:
            descriptors: the judge's ends of its channel and control socket, its page of flags, and on a CPU its memory.
            compile_s: time limit in seconds for compilers in all further phases together.
            cpu_before_s: CPU time in seconds used so far, which does not count.
        """
        process = cls.__new__(cls)
        channel, control_end, page, *memory = descriptors
        sockets = socket.socket(fileno=channel), socket.socket(fileno=control_end)
        process._hold(forkserver, scratch, *sockets, page, compile_s)
        process.memory = ProcessMemory(*memory) if memory else None
        process._phase = phase
        process._cpu_before_s = cpu_before_s
        for flag in (flags.GO, flags.READY, flags.DONE, flags.COMPILING, flags.TIMED, flags.ON_GPU):
            process.flags[flag] = 0  # numbers of calls start at 0 again
        return process

    def leave(self, key: str, memo: dict[str, Any], wanted: Path, *, seconds: float = 60.0) -> None:
        """Keep the process for a later evaluation, and close this handle. See :class:`Keep` for the arguments.

        Raises:
            ForkServerError: the fork server is gone.
        """
        self.imports.close()
        descriptors = [self._channel.fileno(), self._control.fileno(), self._page]
        if self.memory is not None:
            descriptors.append(self.memory.descriptor)
        self._forkserver.keep(Keep(self._scratch, key, memo, str(wanted), seconds), descriptors)
        self.close()

    def close(self) -> None:
        """Close the descriptors. The fork server ends a process without a judge's handle."""
        self._channel.close()
        self._control.close()
        os.close(self._page)
        if self.memory is not None:
            self.memory.close()

    @cached_property
    def semaphores(self) -> Semaphores:
        """Access of the judge's streams to the page of flags.

        Raises:
            CudaCallError: CUDA cannot register the page.
        """
        return Semaphores(self.flags)

    def share_flags(self) -> None:
        """Register the page of flags with CUDA now instead of at the first timed call."""
        _ = self.semaphores

    @property
    def phase(self) -> Phase:
        """The process's current phase."""
        return self._phase

    def enter(self, phase: Phase, seconds: float, gpu_s: float | None = None) -> None:
        """Begin a phase. Its clock runs between :meth:`start_clock` and :meth:`stop_clock`.

        Args:
            gpu_s: time limit in seconds for the wait for the GPU after a checked call.
        """
        self._phase, self._seconds, self._gpu_s = phase, seconds, gpu_s
        self._notify(Enter(str(phase), seconds, gpu_s))

    def charge_compilers(self, seconds: float) -> None:
        """Subtract the compile time of another process that compiled for this one."""
        self.allow_compilers(max(self._compile_s - seconds, 0.0))

    def allow_compilers(self, seconds: float) -> None:
        """Set the remaining time for compilers."""
        self._compile_s = seconds
        self._notify(Compilers(seconds))

    def start_clock(self) -> None:
        """Start the phase's clock, because the process is working. The fork server ends it at the deadline."""
        self._notify(Turn(True))

    def stop_clock(self) -> None:
        """Stop the phase's clock, because the judge is working and the process waits."""
        self._notify(Turn(False))

    def order(self, order: Order, *, promptly: bool = False, **arguments: Any) -> Reply:
        """Send an order on the phase's clock and wait for its reply. With ``promptly``, poll briefly at first."""
        self.start_clock()
        sequence = self.send(order, **arguments)
        if promptly:
            self.look_out()
        reply = self.receive(sequence)
        self.stop_clock()
        return reply

    def order_each(self, order: Order, count: int, **arguments: Any) -> list[Reply | EvaluationEnded]:
        """Send an order that has ``count`` replies, on the phase's clock, and wait for them.

        Returns:
            each reply, or the exception with its outcome if the process still runs.

        Raises:
            EvaluationEnded: the process has ended.
            ForkServerError: the fork server failed (:meth:`receive`).
        """
        self.start_clock()
        sequence = self.send(order, **arguments)
        replies: list[Reply | EvaluationEnded] = []
        for _ in range(count):
            try:
                replies.append(self.receive(sequence))
            except EvaluationEnded as ended:
                if self.ended is not None:
                    raise
                replies.append(ended)
        self.stop_clock()
        return replies

    def send(
        self, order: Order, *, seed: int = 0, payload: Any = None, fds: tuple[int, ...] = (), replies: int = 1
    ) -> int:
        """Send an order without waiting for its replies, which have consecutive numbers. Return the first number."""
        sequence, *_ = [next(self._sequence) for _ in range(replies)]
        try:
            send_command(self._channel, order, sequence, seed=seed, payload=payload, fds=fds)
        except OSError:
            raise self.died() from None
        return sequence

    def receive(self, sequence: int) -> Reply:
        """Wait for the reply to an order.

        Raises:
            EvaluationEnded: the process raised an exception, died, was ended, or sent an invalid reply.
            ForkServerError: the fork server did not end the process at its deadline.
        """
        allowed = self._seconds + self._compile_s + _GRACE_S
        ready, waited = _await(allowed, self._channel, self._control)
        self.waited_s += waited
        if not ready:
            self._forkserver.kill()
            raise ForkServerError("the fork server did not end a candidate that was beyond its deadline")
        if self._channel not in ready:
            raise self.died()
        try:
            while isinstance(reply := receive_record(self._channel), Export):
                self._take(reply)
        except (ProtocolError, OSError) as error:
            self.stop()
            raise EvaluationEnded(
                Category.SANDBOX_VIOLATION, f"the process wrote to the judge's channel: {error}", self._phase
            ) from None
        if reply is None:
            raise self.died()
        if reply.answer is Answer.RAISED:
            # It can be from an earlier order, because work that was enqueued in advance fails after the reply.
            raise self._raised(reply)
        if reply.sequence != sequence:
            self.stop()
            raise EvaluationEnded(
                Category.SANDBOX_VIOLATION, "the process answered an order that was not given", self._phase
            )
        return reply

    def _take(self, export: Export) -> None:
        """Accept memory that the process announces. Raise ProtocolError if the announcement is invalid."""
        # On a CPU the process announces its memory before foreign code runs in it. Only then the descriptor is trusted.
        if self._phase is Phase.PREPARE:
            if self.memory is not None:
                self.memory.close()
            [descriptor] = export.descriptors
            self.memory = ProcessMemory(descriptor)
        elif self.memory is None:
            self.imports.add(export)
        else:
            for descriptor in export.descriptors:
                os.close(descriptor)
            raise ProtocolError("memory was announced in a phase that allows none")

    def become(self, order: Order, payload: Any, descriptor: int) -> None:
        """Make the process become another program, which does not reply to orders. The phase's clock continues.

        The program sends its messages on the socket ``descriptor``.

        Raises:
            EvaluationEnded: the program could not start.
            ForkServerError: the fork server failed (:meth:`receive`).
        """
        self.start_clock()
        self.send(order, payload=payload, fds=(descriptor,))
        ready, _ = _await(self._seconds + _GRACE_S, self._channel, self._control)
        if self._channel not in ready:
            raise self.died()
        try:
            reply = receive_record(self._channel)
        except (ProtocolError, OSError):
            reply = None  # not a violation, because no foreign code has run in the process yet
        if isinstance(reply, Reply):
            raise self._raised(reply)

    def ends(self, seconds: float, *sockets: socket.socket) -> bool:
        """Wait up to ``seconds`` for messages on the program's sockets. Return whether the program has ended."""
        return self._control in _readable(seconds, *sockets, self._control)

    def look_out(self) -> None:
        """Poll briefly for a reply that is expected at once and must be seen without delay (:func:`wait_briefly`)."""
        wait_briefly(self._channel, self._control)

    def answered(self, seconds: float = 0) -> bool:
        """Wait up to ``seconds``. Return whether a reply can be received or the process has ended."""
        return bool(_readable(seconds, self._channel, self._control))

    def begin_stop(self) -> None:
        """Request the end of a running process without waiting for it, which :meth:`stop` does."""
        if self.ended is None:
            self._notify(Stop())

    def stop(self) -> Report:
        """End the process if it runs, and return the fork server's report.

        Raises:
            ForkServerError: the fork server sent no report.
        """
        if self.ended is None:
            self.begin_stop()
            self._await_report()
        assert self.ended is not None
        return self.ended

    def _notify(self, message: control.Word) -> None:
        with contextlib.suppress(OSError):  # the process has ended, and its report is in the socket
            self._control.send(control.pack(message))

    def _await_report(self) -> None:
        report = self._receive_message()
        assert isinstance(report, Report), "no other message was requested"
        self._conclude(report)

    def _receive_message(self) -> control.Answer:
        """Wait for the fork server's next message. Raise ForkServerError if none comes."""
        data = b""
        patience = _GRACE_S
        while not data and patience > 0:
            ready, waited = _await(patience, self._control)
            patience -= waited
            if ready:
                # This error comes once if the fork server closed its end with an unread message. The report follows.
                with contextlib.suppress(ConnectionResetError):
                    data = self._control.recv(1 << 20)
                    break
        if not data:
            self._forkserver.kill()
            raise ForkServerError("the fork server did not report a candidate's end or its CPU time")
        return control.unpack(data, (Counted, Report))

    def _conclude(self, report: Report) -> None:
        self.ended = report
        self.cpu_s = report.cpu_s - self._cpu_before_s
        self.close()

    def count(self) -> Counted:
        """Request the process's figures so far from the fork server. No order must be pending.

        Raises:
            EvaluationEnded: the process has died.
            ForkServerError: the fork server did not answer.
        """
        self._notify(Count())
        match self._receive_message():
            case Counted() as counted:
                self.cpu_s = counted.cpu_s - self._cpu_before_s
                self._clock = (~counted.pid << 3) | _CPU_CLOCK
                return counted
            case report:
                self._conclude(report)
                raise self.died()

    def cpu_ns(self) -> int:
        """Return the CPU time of the process's threads in nanoseconds, or 0 if the system does not report it.

        No order must be pending at the first call, which is one of :meth:`count`.
        """
        if self._clock is None:
            self.count()
        assert self._clock is not None
        try:
            return time.clock_gettime_ns(self._clock)
        except OSError:
            return 0

    def _raised(self, reply: Reply) -> EvaluationEnded:
        """Return the outcome for an exception in the process, from its tag, CUDA's code and the phase."""
        facts: dict[str, Any] = {"exception": reply.exception, "cuda_code": reply.code or None}
        if reply.tag is Tag.FILES:
            facts["reason"] = End.SCRATCH
        if reply.tag is Tag.RESOURCES and reply.shortage.resource:
            shortage = dataclasses.asdict(reply.shortage)
            facts["shortage"] = {name: one_line(v) if isinstance(v, str) else v for name, v in shortage.items()}
        return EvaluationEnded(_category(reply, self._phase), _message(reply), self._phase, reply=reply, **facts)

    def died(self) -> EvaluationEnded:
        """Return the outcome for the process's death, from the fork server's report."""
        if self.ended is None:
            self._notify(Closed())
            self._await_report()
        ended = self.ended
        assert ended is not None
        if ended.reason is End.UNSEALED:
            raise ForkServerError(f"a candidate could not be sealed: {ended.log}")
        facts: dict[str, Any] = {"reason": ended.reason, "status": ended.status, "peak_bytes": ended.peak_bytes}
        if ended.reason is End.DEADLINE:
            phase = Phase(ended.phase)
            category = Category.COMPILE_TIMEOUT if phase is Phase.COMPILE else Category.TIMEOUT
            seconds, setting = self._compile_s if phase is Phase.COMPILE else self._seconds, f"{phase}_s"
            named = f" (setting deadlines.{setting})" if setting in Deadlines.model_fields else ""
            what, within = f"the {phase} phase", f"its deadline of {seconds:.4g} s"
            if ended.hung:
                what, within = "the GPU's work for one call", f"{self._gpu_s:.4g} s"
                named = ", 300 times the reference's time or the setting deadlines.gpu_s, whichever is longer"
            return EvaluationEnded(category, f"{what} did not end within {within}{named}", phase, **facts)
        if ended.reason in _REASONS:
            category = _REASONS[ended.reason]
            limit = f"the {ended.reason} limit of {ended.limit_bytes} bytes"
            setting = f"setting limits.{_SETTINGS[ended.reason]}"
            if ended.reason is End.MEMORY and ended.limit_bytes == int(HOST_SHARE * linux.physical_bytes()):
                setting = f"{HOST_SHARE:.0%} of the host's memory, the most that the {setting} gives"
            message = f"{limit} was exceeded ({setting})"
            if ended.reason is End.MEMORY:
                message += f": {ended.peak_bytes} bytes were in use at most"
            if ended.reason is End.SCRATCH:
                message += ", or there were too many files"
            return EvaluationEnded(category, message, self._phase, **facts)
        if ended.reason is End.CLOSED:
            return EvaluationEnded(
                Category.SANDBOX_VIOLATION, "the process closed the judge's channel", self._phase, **facts
            )
        if ended.reason is End.STUCK or ended.status is None:
            # The next candidate's end would count this process among its leftovers, so the fork server is replaced.
            self._forkserver.kill()
            raise ForkServerError("a candidate's process could not be ended: it hangs in the kernel or a driver")
        if os.WIFSIGNALED(ended.status):
            number = os.WTERMSIG(ended.status)
            facts["signal"] = name = signal.Signals(number).name if number in signal.valid_signals() else str(number)
            how = f"the process was ended by {name}"
        else:
            facts["exit_status"] = code = os.WEXITSTATUS(ended.status)
            how = f"the process exited with status {code}"
        if ended.robbed:
            how, facts["out_of_memory"] = "the host had no memory left for the process, or for a part of it", True
        elif facts.get("signal") == signal.SIGKILL.name:
            how += ", from outside"
        else:
            return EvaluationEnded(Category.CRASHED, how, self._phase, **facts)
        return EvaluationEnded(Category.WORKER_LOST, how, self._phase, **facts)


def _await(seconds: float, *sockets: socket.socket) -> tuple[list[socket.socket], float]:
    """Wait until sockets are readable. Return these, and the seconds waited. Pauses of the fleet do not count."""
    meter, waited = pauses.Meter(), 0.0
    while not (ready := _readable(min(seconds - waited, _LOOK_S), *sockets)) and waited < seconds:
        waited += meter.look()
    return ready, waited + meter.look()


def _readable(seconds: float, *sockets: socket.socket) -> list[socket.socket]:
    """Wait until sockets are readable, and return these. Unlike ``select``, descriptors can be above 1023."""
    poll = select.poll()
    for each in sockets:
        poll.register(each, select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll(seconds * 1000)}
    return [each for each in sockets if each.fileno() in ready]


def _message(reply: Reply) -> str:
    """Return a verdict's message about an exception: its type and text, or a compiler's or the judge's words."""
    if reply.exception.startswith("workers.") or (reply.tag is Tag.COMPILE and reply.message):
        return reply.message
    text = reply.message
    if reply.tag is Tag.HOST_MEMORY:
        text = f"{text or 'memory was refused'} (Linux refuses what the host does not have)"
    return f"{reply.exception.removeprefix('builtins.')}: {text}".removesuffix(": ")


def _category(reply: Reply, phase: Phase) -> Category:
    by_tag = {
        Tag.ENTRY_POINT: Category.ENTRY_POINT_MISSING,
        Tag.COMPILE: Category.COMPILE_ERROR,
        Tag.HOST_MEMORY: Category.HOST_OUT_OF_MEMORY,
        Tag.GPU_MEMORY: Category.GPU_OUT_OF_MEMORY,
        Tag.RESOURCES: Category.LAUNCH_RESOURCES_EXCEEDED,
        Tag.EXIT: Category.CRASHED,
        Tag.FILES: Category.OUTPUT_LIMIT,
    }
    by_phase = {Phase.LOAD: Category.IMPORT_ERROR, Phase.CONSTRUCT: Category.INIT_ERROR}
    if reply.tag is Tag.EXIT and phase in by_phase:
        return by_phase[phase]
    if reply.tag in by_tag:
        return by_tag[reply.tag]
    if reply.tag is Tag.CUDA or reply.code:
        if reply.code == _ILLEGAL_ADDRESS:
            return Category.ILLEGAL_MEMORY_ACCESS
        # A call of the judge's own code is no launch.
        launch = reply.code in _TOO_MUCH and not reply.exception.endswith(".gpu_memory.CudaCallError")
        return Category.LAUNCH_RESOURCES_EXCEEDED if launch else Category.CUDA_ERROR
    return by_phase.get(phase, Category.RUNTIME_ERROR)
