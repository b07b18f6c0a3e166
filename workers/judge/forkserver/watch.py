"""The watch over running sealed processes: their limits, the judge's messages about them, their ends and reports."""

from __future__ import annotations

import contextlib
import math
import os
import re
import select
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import structlog

from workers.judge.candidate import harness
from workers.judge.channel import flags
from workers.judge.forkserver import control
from workers.judge.forkserver.control import Closed, Compilers, Count, Counted, End, Enter, Report, Stop, Turn
from workers.judge.forkserver.files import Files
from workers.judge.forkserver.launchers import Launchers
from workers.judge.forkserver.orphans import Children, ProcessTree, await_end, has_ended
from workers.judge.host import linux, pauses
from workers.judge.sandbox import shelf
from workers.judge.sandbox.cgroups import Lack
from workers.judge.sandbox.seal import Profile, Role

_log: Any = structlog.get_logger(__name__)

#: Number of final bytes of a process's output that are kept.
_TAIL: Final = 16 << 10
#: The frames of a sealed process's stack before its own, and what Python writes after them.
_BEFORE: Final = re.compile(r'\n  File "[^"\n]*/workers/judge/forkserver/spawn\.py", line \d+ in .*', re.DOTALL)
#: Signal at which Python writes its stack to its output and dies. One that it survives would end a sleep.
_STACK: Final = signal.SIGABRT
_DEATH: Final = "Fatal Python error: Aborted\n\n"
#: Maximum seconds to wait for that.
_STACK_S: Final = 0.25
#: Seconds between two checks of a running process's memory.
_WATCH: Final = 0.04
#: Seconds to wait for a killed process to exit. A process that hangs in a driver never exits.
REAP: Final = 10.0
#: Seconds after which a process that closed its channel is killed.
_DYING: Final = 1.0
#: Ends that are not logged.
_QUIET_ENDS: Final = frozenset({End.STOPPED, End.EXITED})
#: Ends that are the host's fault, and are logged as warnings.
_OUR_TROUBLE: Final = frozenset({End.KILLED, End.STUCK, End.UNSEALED})


@dataclass(slots=True)
class _Budget:
    """The seconds left for a phase, for the current call's wait for the GPU, and for compilation."""

    left: dict[str, float] = field(default_factory=lambda: {"phase": 0.0, "gpu": math.inf, "compile": 0.0})
    running: bool = False
    meter: pauses.Meter = field(default_factory=pauses.Meter)

    def spend(self, works: Sequence[str]) -> str | None:
        """Subtract the time since the last call, without pauses of the fleet. Return the exhausted budget, or None."""
        passed = self.meter.look()
        if not self.running:
            return None
        for work in works:
            self.left[work] -= passed
        return next((work for work in works if self.left[work] <= 0), None)


@dataclass(eq=False)
class Sealed(ProcessTree):
    """A running sealed process, with the fork server's ends of its control socket and of its output.

    ``about`` identifies the evaluation in the log. ``tail`` is the end of the ``written`` bytes of output. ``peak`` is
    the maximum observed memory in bytes. ``unsealed`` is the reason if the seal failed. ``gpu_s`` is the time limit of
    a call's wait for the GPU, and ``hung`` is True if it was exceeded.
    """

    profile: Profile
    files: Files
    control: socket.socket
    flags: memoryview[int]
    output: int
    about: dict[str, str | int]
    phase: str = field(default="load", init=False)
    budget: _Budget = field(default_factory=_Budget, init=False)
    peak: int = field(default=0, init=False)
    written: int = field(default=0, init=False)
    tail: bytearray = field(default_factory=bytearray, init=False)
    unsealed: str = field(default="", init=False)
    gpu_s: float = field(default=math.inf, init=False)
    hung: bool = field(default=False, init=False)

    @property
    def works(self) -> tuple[str, ...]:
        """The budgets that the process spends now."""
        if self.flags[flags.COMPILING]:
            return ("compile",)
        return ("phase", "gpu") if self.flags[flags.ON_GPU] else ("phase",)

    def heed(self, message: Compilers | Enter | Turn) -> None:
        """Apply the judge's message about phase, time limit or clock."""
        self.budget.spend(self.works)
        match message:
            case Compilers(seconds):
                self.budget.left["compile"] = seconds
            case Enter(phase, seconds, gpu_s):
                self.phase, self.budget.left["phase"] = phase, seconds
                self.gpu_s = math.inf if gpu_s is None else gpu_s
            case Turn(running):
                self.budget.running, self.budget.left["gpu"] = running, self.gpu_s

    def overdue(self) -> str | None:
        """Return the phase whose deadline has passed, or None."""
        work = self.budget.spend(self.works)
        self.hung = work == "gpu"
        return work if work in (None, "compile") else self.phase

    @property
    def log(self) -> str:
        """The end of the output."""
        return self.tail.decode("utf-8", "replace")

    def read_output(self) -> bool:
        """Read new output and keep its tail. Return False if there is none."""
        try:
            data = os.read(self.output, 65536)
        except BlockingIOError:
            return False
        self.written += len(data)
        self.tail += data
        del self.tail[:-_TAIL]
        return bool(data)

    def exceeded(self, orphans: list[int]) -> End | None:
        """Return the end that an exceeded limit causes, or None."""
        total = sum(map(linux.memory_bytes, self.pids(orphans))) + self.files.memory_bytes()
        self.peak = max(self.peak, total)
        if total > self.profile.host_memory_bytes:
            return End.MEMORY
        if (lack := self.out_of_memory()) is not None:
            return End.MEMORY if lack is Lack.OWN else End.KILLED
        return End.SCRATCH if self.files.overfull(self.pids([])) else None


class Watch:
    """The running sealed processes by pid, from their start to their reports, and all children of the fork server."""

    def __init__(self, selector: selectors.BaseSelector, launchers: Launchers, *, seccomp: bool) -> None:
        """Watch sockets and pipes by the event loop's ``selector``. ``seccomp`` is whether processes run under it."""
        self.running: dict[int, Sealed] = {}
        self.children = Children(self.running, launchers)
        self._selector = selector
        self._launchers = launchers
        self._seccomp = seccomp
        self._looked = 0.0

    def add(self, process: Sealed) -> None:
        """Watch a new process, whose seal is complete or has failed."""
        self._selector.register(process.control, selectors.EVENT_READ, lambda: self._on_control(process))
        self._selector.register(process.output, selectors.EVENT_READ, lambda: self._on_output(process))
        if process.unsealed:
            self.end(process, End.UNSEALED)

    def seconds(self) -> float:
        """Return the maximum seconds until the next check."""
        running = [process for process in self.running.values() if process.budget.running]
        return max(0.0, min([_WATCH, *(process.budget.left[work] for process in running for work in process.works)]))

    def check(self, now: float, waiting: set[str]) -> list[int]:
        """End the processes that exceed a limit, except those with directories in ``waiting``. Return the orphans."""
        look = now - self._looked >= _WATCH
        orphans = self.children.orphans() if look and self.running else []
        for process in [each for each in self.running.values() if each.profile.scratch not in waiting]:
            if (phase := process.overdue()) is not None:
                process.phase = phase
                self.end(process, End.DEADLINE)
            elif look and (reason := process.exceeded(orphans)) is not None:
                self.end(process, reason)
        if look:
            self._looked = now
        return orphans

    def conclude_ended(self) -> None:
        """Report the processes that have exited. Call this when a child has exited."""
        self.children.collect_helpers()
        for process in list(self.running.values()):
            if has_ended(process.pid):
                self._conclude(process, End.EXITED)

    def _on_control(self, process: Sealed) -> None:
        if process.pid not in self.running:
            return
        try:
            data = process.control.recv(65536)
        except ConnectionResetError:
            data = b""
        match control.unpack(data, (Compilers, Enter, Turn, Count, Stop, Closed)) if data else Stop():
            case Count():
                process.read_output()
                used_s = process.cpu_seconds(self.children.orphans())
                counted = Counted(used_s, process.pid, process.peak, process.written, process.log)
                with contextlib.suppress(OSError):  # the judge is gone
                    process.control.send(control.pack(counted))
            case Closed():
                # The process is exiting, or pretends to. An exiting process releases the GPU last, which takes seconds
                # if many processes exit at once.
                begun = time.monotonic()
                while not has_ended(process.pid) and time.monotonic() < begun + (
                    REAP if linux.is_exiting(process.pid) else _DYING
                ):
                    time.sleep(0.001)
                self.end(process, End.CLOSED)
            case Stop():
                self.end(process, End.STOPPED)
            case message:
                process.heed(message)

    def _on_output(self, process: Sealed) -> None:
        if process.pid not in self.running:
            return
        if not process.read_output():
            self._selector.unregister(process.output)
        elif process.written > process.profile.output_bytes:
            self.end(process, End.OUTPUT)

    def end(self, process: Sealed, reason: End) -> None:
        """Kill a sealed process and report its end. The reason is ``EXITED`` if it has ended already."""
        if has_ended(process.pid):
            self._conclude(process, End.EXITED)
            return
        if reason is End.DEADLINE:
            self._await_stack(process)
        os.kill(process.pid, signal.SIGKILL)
        begun = time.monotonic()
        await_end(process.pid, _DYING)
        while not has_ended(process.pid):
            if time.monotonic() > begun + _DYING:
                # A process that one of its descendants traces can be reaped only after the tracer's end.
                self.children.kill(process)
            if time.monotonic() > begun + REAP:
                reason = End.STUCK
                break
            time.sleep(0.0005)
        self._conclude(process, reason)

    @staticmethod
    def _await_stack(process: Sealed) -> None:
        """Make a process write its stack and die, and read it."""
        os.kill(process.pid, _STACK)
        until = time.monotonic() + _STACK_S
        while (left := until - time.monotonic()) > 0 and not _BEFORE.search(process.log):
            if select.select([process.output], [], [], left)[0] and not process.read_output():
                return

    def _conclude(self, process: Sealed, reason: End) -> None:
        """Kill the remaining processes of an ended process, report its end, and remove its files."""
        leftovers = process.own(self.children.orphans())
        self.children.kill(process)
        if reason is End.STUCK:
            process.cpu_seconds(leftovers)
        status = None if reason is End.STUCK else process.reap(process.pid)
        lack = process.out_of_memory()
        reason = self._true_reason(reason, status, lack)
        del self.running[process.pid]
        self.children.sweep(process)
        # The number of reads is bounded, because a surviving process could write forever.
        for _ in range(64):
            if not process.read_output():
                break
        if process.output in self._selector.get_map():
            self._selector.unregister(process.output)
        self._selector.unregister(process.control)
        os.close(process.output)
        if reason is not End.SCRATCH:  # otherwise the size is measured already, and unlinked files can be gone
            process.files.weigh(process.pids([]))
        self._collect_files(process, status)
        profile, log = process.profile, _BEFORE.sub("", process.log)
        report = Report(
            reason=End.UNSEALED if process.unsealed else reason,
            phase=process.phase,
            status=status,
            leftovers=len(leftovers),
            # Between two looks a group can reach its limit, with memory that no process has mapped.
            peak_bytes=max(process.peak, profile.host_memory_bytes) if lack is Lack.OWN else process.peak,
            output_bytes=process.written,
            log=process.unsealed or (log.replace(_DEATH, "") if reason is End.DEADLINE else log),
            scratch_bytes=process.files.bytes,
            robbed=lack is Lack.OTHERS,
            cpu_s=max(process.used_s, process.reaped_s),
            limit_bytes={
                End.MEMORY: profile.host_memory_bytes,
                End.OUTPUT: profile.output_bytes,
                End.SCRATCH: profile.scratch_bytes,
            }.get(reason, 0),
            hung=process.hung,
        )
        send_report(process.control, report)
        _log_end(process, report)
        self.children.remove(process.files)

    def _true_reason(self, reason: End, status: int | None, lack: Lack | None) -> End:
        """Return the reason for an end from the wait status, or from the lack of memory that caused it."""
        ours = {End.CLOSED: {signal.SIGKILL}, End.DEADLINE: {signal.SIGKILL, _STACK}}.get(reason)
        if ours is not None and status is not None and os.WTERMSIG(status) not in ours:
            reason = End.EXITED  # it was already exiting before it was killed
        if reason is not End.EXITED:
            return reason
        if lack is Lack.OWN:
            return End.MEMORY
        # With seccomp a process cannot send SIGKILL to itself.
        killed = status is not None and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        return End.KILLED if lack is Lack.OTHERS or (killed and self._seccomp) else reason

    def _collect_files(self, process: Sealed, status: int | None) -> None:
        """Take the builder's libraries, or the types of launchers that a candidate needed."""
        profile = process.profile
        owner = os.geteuid() if profile.uid is None else profile.uid
        if profile.role is Role.BUILDER and profile.built is not None and status is not None:
            shelf.take(process.files.root, Path(profile.built), owner, profile.file_bytes)
        elif profile.role is Role.CANDIDATE:
            self._launchers.learn(process.files.root / harness.LAUNCHED, owner)


def send_report(control_end: socket.socket, report: Report) -> None:
    """Send a report to the judge, if it still exists, and close the control socket."""
    with contextlib.suppress(OSError):  # the judge is gone
        control_end.send(control.pack(report))
    control_end.close()


def _log_end(process: Sealed, report: Report) -> None:
    """Log an unusual end of a sealed process, without the process's output."""
    if report.reason in _QUIET_ENDS:
        return
    log = _log.warning if report.reason in _OUR_TROUBLE else _log.info
    log(
        "a sealed process was ended",
        role=str(process.profile.role),
        how=str(report.reason),
        phase=report.phase,
        status=report.status,
        leftovers=report.leftovers,
        peak_bytes=report.peak_bytes,
        **process.about,
    )
