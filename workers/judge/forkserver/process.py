"""The judge's handle on a sealed process: a candidate, a reference or a builder."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import select
import signal
import socket
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

from kqueue.categories import Category
from kqueue.contract import Phase
from kqueue.text import one_line
from workers.judge.channel import flags
from workers.judge.channel.buffers import Imports, ProcessMemory
from workers.judge.channel.packets import wait_briefly
from workers.judge.channel.protocol import (
    Answer,
    Export,
    Order,
    ProtocolError,
    Reply,
    Tag,
    receive_record,
    send_command,
)
from workers.judge.channel.semaphores import Semaphores
from workers.judge.ending import EvaluationEnded
from workers.judge.forkserver import control
from workers.judge.forkserver.control import Closed, Compilers, Count, Counted, End, Enter, Keep, Report, Stop, Turn
from workers.judge.forkserver.handle import ForkServer, ForkServerError
from workers.judge.host import pauses
from workers.judge.sandbox.seal import Profile

#: Seconds beyond a deadline after which the fork server itself is taken to have failed.
_GRACE_S: Final = 30.0
#: Seconds between two looks at the clock while a process is waited for.
_LOOK_S: Final = 0.25
#: CUDA's codes that say a launch asked for too much: invalid value (too much dynamic shared memory),
#: invalid configuration (too many threads), launch out of resources (registers).
_TOO_MUCH: Final = frozenset({1, 9, 701})
_ILLEGAL_ADDRESS: Final = 700
_REASONS: Final = {
    End.MEMORY: Category.HOST_OUT_OF_MEMORY,
    End.OUTPUT: Category.OUTPUT_LIMIT,
    End.SCRATCH: Category.OUTPUT_LIMIT,
}


class SealedProcess:
    """One sealed process, from its fork to its report.

    Every order either returns the process's reply or raises :class:`EvaluationEnded` with what became of it.

    Attributes:
        ended: the fork server's report, once the process is gone.
        flags: the page of flags.
        waited_s: seconds that its replies were waited for, pauses of the fleet left out.
        imports: what the process has shared of its memory on a GPU.
        memory: what it has of memory on a CPU, where it runs there and has said so.
        cpu_s: seconds of CPUs that it and all that it has started have used since this judge has it, by what trusted
            code has counted; known once it has ended or is kept.
    """

    def __init__(self, forkserver: ForkServer, profile: Profile, compile_s: float) -> None:
        """Have the process forked; it waits for orders.

        Args:
            forkserver: the slot's.
            profile: its role and bounds.
            compile_s: what compilers may take in all its phases together, in seconds.

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
        self._compile_s = compile_s
        self._cpu_before_s = 0.0
        self._tell(Compilers(compile_s))

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
        """Go on with a process that was left (:meth:`leave`).

        Args:
            forkserver: the slot's.
            scratch: the process's directory.
            descriptors: the judge's ends of its channel and control socket, its page of flags, and on a CPU its memory.
            phase: the phase that it is in.
            compile_s: as for a new one.
            cpu_before_s: the CPU time that it had used by then, in seconds, which does not count.
        """
        process = cls.__new__(cls)
        channel, control_end, page, *memory = descriptors
        sockets = socket.socket(fileno=channel), socket.socket(fileno=control_end)
        process._hold(forkserver, scratch, *sockets, page, compile_s)
        process.memory = ProcessMemory(*memory) if memory else None
        process._phase = phase
        process._cpu_before_s = cpu_before_s
        for flag in (flags.GO, flags.READY, flags.DONE, flags.COMPILING):
            process.flags[flag] = 0  # numbers of calls begin anew
        return process

    def leave(self, key: str, memo: dict[str, Any], wanted: Path, *, seconds: float = 60.0) -> None:
        """Leave the process to a later evaluation.

        Args:
            key: what it serves.
            memo: what its judge must know.
            wanted: a file that changes when the memory that the process holds is wanted, which ends it.
            seconds: how long it is kept where nobody takes it.

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
        """Forget the descriptors. The fork server ends a process that nobody holds."""
        self._channel.close()
        self._control.close()
        os.close(self._page)
        if self.memory is not None:
            self.memory.close()

    @cached_property
    def semaphores(self) -> Semaphores:
        """The page of flags as the judge's streams see it.

        Raises:
            CudaCallError: the driver refuses.
        """
        return Semaphores(self.flags)

    def share_flags(self) -> None:
        """Have the judge's streams see the page of flags now, and not at the first timed call."""
        _ = self.semaphores

    @property
    def phase(self) -> Phase:
        """The phase that the process is in."""
        return self._phase

    def enter(self, phase: Phase, seconds: float) -> None:
        """Begin a phase. Its clock runs between :meth:`start_clock` and :meth:`stop_clock`."""
        self._phase, self._seconds = phase, seconds
        self._tell(Enter(str(phase), seconds))

    def charge_compilers(self, seconds: float) -> None:
        """Take from what compilers may use: another process has compiled for this one."""
        self.allow_compilers(max(self._compile_s - seconds, 0.0))

    def allow_compilers(self, seconds: float) -> None:
        """Let compilers take so long from now on."""
        self._compile_s = seconds
        self._tell(Compilers(seconds))

    def start_clock(self) -> None:
        """Start the phase's clock: the process is at work, and the fork server ends it at the deadline."""
        self._tell(Turn(True))

    def stop_clock(self) -> None:
        """Stop the phase's clock: the judge is at work, and the process waits."""
        self._tell(Turn(False))

    def order(self, order: Order, *, promptly: bool = False, **arguments: Any) -> Reply:
        """Give an order, on the phase's clock, and wait for its reply; ``promptly`` looks out for it at first."""
        self.start_clock()
        sequence = self.send(order, **arguments)
        if promptly:
            self.look_out()
        reply = self.receive(sequence)
        self.stop_clock()
        return reply

    def order_each(self, order: Order, count: int, **arguments: Any) -> list[Reply | EvaluationEnded]:
        """Give an order that has ``count`` replies, on the phase's clock, and wait for them.

        Returns:
            the replies, or what became of each where the process lives on.

        Raises:
            EvaluationEnded: the process has ended.
            ForkServerError: as :meth:`receive`.
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

    def send(self, order: Order, *, seed: int = 0, payload: Any = None, fds: tuple[int, ...] = ()) -> int:
        """Give an order without waiting; return its number."""
        sequence = next(self._sequence)
        try:
            send_command(self._channel, order, sequence, seed=seed, payload=payload, fds=fds)
        except OSError:
            raise self.died() from None
        return sequence

    def receive(self, sequence: int) -> Reply:
        """Wait for the reply to an order.

        Raises:
            EvaluationEnded: the process raised, died, was ended, or answered nonsense.
            ForkServerError: nobody ended it although its time was up.
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
            # Also of the order before: what was enqueued ahead fails after it was answered.
            raise self._raised(reply)
        if reply.sequence != sequence:
            self.stop()
            raise EvaluationEnded(
                Category.SANDBOX_VIOLATION, "the process answered an order that was not given", self._phase
            )
        return reply

    def _take(self, export: Export) -> None:
        """Take memory that the process announces.

        On a CPU it does so before foreign code runs in it: only then it is known what the descriptor opens.

        Raises:
            ProtocolError: it cannot be what is announced.
        """
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
            raise ProtocolError("memory was announced where there is none to announce")

    def become(self, order: Order, payload: Any, descriptor: int) -> None:
        """Give an order by which the process becomes another program, which answers nothing; its clock runs on.

        Args:
            order, payload: the order.
            descriptor: what the program says its words on.

        Raises:
            EvaluationEnded: it could not.
            ForkServerError: as :meth:`receive`.
        """
        self.start_clock()
        self.send(order, payload=payload, fds=(descriptor,))
        ready, _ = _await(self._seconds + _GRACE_S, self._channel, self._control)
        if self._channel not in ready:
            raise self.died()
        try:
            reply = receive_record(self._channel)
        except (ProtocolError, OSError):
            reply = None  # nothing foreign has run in it so far
        if isinstance(reply, Reply):
            raise self._raised(reply)

    def ends(self, seconds: float, *words: socket.socket) -> bool:
        """Wait up to ``seconds`` for words of the program that it has become; return whether it has ended."""
        return self._control in _readable(seconds, *words, self._control)

    def look_out(self) -> None:
        """Wait a moment for a reply that is expected at once and must not be seen late (:func:`wait_briefly`)."""
        wait_briefly(self._channel, self._control)

    def answered(self, seconds: float = 0) -> bool:
        """Return whether within ``seconds`` a reply can be received, or the process has ended."""
        return bool(_readable(seconds, self._channel, self._control))

    def begin_stop(self) -> None:
        """Have the process ended if it lives, and do not wait for it: :meth:`stop` does."""
        if self.ended is None:
            self._tell(Stop())

    def stop(self) -> Report:
        """End the process if it lives, and return the fork server's report.

        Raises:
            ForkServerError: no report came.
        """
        if self.ended is None:
            self.begin_stop()
            self._await_report()
        assert self.ended is not None
        return self.ended

    def _tell(self, word: control.Word) -> None:
        with contextlib.suppress(OSError):  # it has ended; its report is waiting
            self._control.send(control.pack(word))

    def _await_report(self) -> None:
        report = self._hear()
        assert isinstance(report, Report), "nothing else was asked for"
        self._conclude(report)

    def _hear(self) -> control.Answer:
        """Wait for the fork server's next word.

        Raises:
            ForkServerError: none came.
        """
        data = b""
        patience = _GRACE_S
        while not data and patience > 0:
            ready, waited = _await(patience, self._control)
            patience -= waited
            if ready:
                # Said once where a message of ours was not read; the report comes after it.
                with contextlib.suppress(ConnectionResetError):
                    data = self._control.recv(1 << 20)
                    break
        if not data:
            self._forkserver.kill()
            raise ForkServerError("the fork server did not report how a candidate ended, or what it has used")
        return control.unpack(data, (Counted, Report))

    def _conclude(self, report: Report) -> None:
        self.ended = report
        self.cpu_s = report.cpu_s - self._cpu_before_s
        self.close()

    def count_cpu(self) -> None:
        """Ask what it has used of CPUs. Nothing may be under way.

        Raises:
            EvaluationEnded: it has died.
            ForkServerError: no answer came.
        """
        self._tell(Count())
        match self._hear():
            case Counted(seconds):
                self.cpu_s = seconds - self._cpu_before_s
            case report:
                self._conclude(report)
                raise self.died()

    def _raised(self, reply: Reply) -> EvaluationEnded:
        """Return the end that an exception in the process means, by its tag, CUDA's code and the phase."""
        facts: dict[str, Any] = {"exception": reply.exception, "cuda_code": reply.code or None}
        if reply.tag is Tag.FILES:
            facts["reason"] = End.SCRATCH
        if reply.tag is Tag.RESOURCES and reply.shortage.resource:
            told = dataclasses.asdict(reply.shortage)
            facts["shortage"] = {name: one_line(v) if isinstance(v, str) else v for name, v in told.items()}
        message = f"{reply.exception}: {reply.message}"
        return EvaluationEnded(_category(reply, self._phase), message, self._phase, reply=reply, **facts)

    def died(self) -> EvaluationEnded:
        """Return the end that the process's death means, by the fork server's report."""
        if self.ended is None:
            self._tell(Closed())
            self._await_report()
        ended = self.ended
        assert ended is not None
        if ended.reason is End.UNSEALED:
            raise ForkServerError(f"a candidate could not be sealed: {ended.log}")
        facts: dict[str, Any] = {"reason": ended.reason, "status": ended.status, "peak_bytes": ended.peak_bytes}
        if ended.reason is End.DEADLINE:
            phase = Phase(ended.phase)
            category = Category.COMPILE_TIMEOUT if phase is Phase.COMPILE else Category.TIMEOUT
            return EvaluationEnded(category, f"the {phase} phase did not end within its deadline", phase, **facts)
        if ended.reason in _REASONS:
            category = _REASONS[ended.reason]
            what = f"the {ended.reason} limit of {ended.limit_bytes} bytes was exceeded"
            if ended.reason is End.SCRATCH:
                what += ", or there were too many files"
            return EvaluationEnded(category, what, self._phase, **facts)
        if ended.reason is End.CLOSED:
            return EvaluationEnded(
                Category.SANDBOX_VIOLATION, "the process closed the judge's channel", self._phase, **facts
            )
        if ended.reason is End.STUCK or ended.status is None:
            # It would be taken for what the next candidate left behind: the slot starts anew without it.
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
    """Wait until sockets can be read, for seconds without pauses; return those, and the seconds that it took."""
    meter, waited = pauses.Meter(), 0.0
    while not (ready := _readable(min(seconds - waited, _LOOK_S), *sockets)) and waited < seconds:
        waited += meter.look()
    return ready, waited + meter.look()


def _readable(seconds: float, *sockets: socket.socket) -> list[socket.socket]:
    """Wait until sockets can be read; return those. Unlike ``select``, it takes descriptors of any number."""
    poll = select.poll()
    for each in sockets:
        poll.register(each, select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll(seconds * 1000)}
    return [each for each in sockets if each.fileno() in ready]


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
    if reply.tag in by_tag:
        return by_tag[reply.tag]
    if reply.tag is Tag.CUDA or reply.code:
        if reply.code == _ILLEGAL_ADDRESS:
            return Category.ILLEGAL_MEMORY_ACCESS
        return Category.LAUNCH_RESOURCES_EXCEEDED if reply.code in _TOO_MUCH else Category.CUDA_ERROR
    return {Phase.LOAD: Category.IMPORT_ERROR, Phase.CONSTRUCT: Category.INIT_ERROR}.get(phase, Category.RUNTIME_ERROR)
