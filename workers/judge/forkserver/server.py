"""The fork server, the trusted parent of a slot's sealed processes. It has imported their libraries and has no secrets.

A slot's worker forks it after importing torch and Triton and before reading any secret (:mod:`workers.start`). The
fork server never initialises CUDA. It forks a sealed process when the judge requests one, and watches it. Only the fork
server ends sealed processes: at a phase's deadline, when they exceed their limits of memory, output or files, at the
judge's request, and when the judge is gone. Then it kills remaining child processes and reports. It also keeps
references, and a prepared candidate without any source, for later evaluations.

:mod:`workers.judge.forkserver.control` defines its messages.
"""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import select
import selectors
import signal
import socket
import subprocess
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NoReturn

import structlog
import torch

from kqueue import logs
from workers.judge.candidate import examiner, harness, reference, tester
from workers.judge.channel import flags
from workers.judge.channel.packets import receive_with_fds, send_with_fds
from workers.judge.forkserver import control, prewarm
from workers.judge.forkserver.control import (
    Closed,
    Compilers,
    Count,
    Counted,
    End,
    Enter,
    Keep,
    Report,
    Spawn,
    Stop,
    Take,
    Turn,
)
from workers.judge.forkserver.files import Files
from workers.judge.forkserver.launchers import Launchers
from workers.judge.host import linux, pauses, uids
from workers.judge.sandbox import seal, self_check, shelf
from workers.judge.sandbox.cgroups import Group, Lack
from workers.judge.sandbox.seal import Role

_log: Any = structlog.get_logger(__name__)

#: Number of final bytes of a process's output that are kept.
_TAIL: Final = 16 << 10
#: Seconds between two checks of a running process's memory.
_WATCH: Final = 0.04
#: Maximum number of kept references. One more can be working, and each has a separate uid.
_MOST_KEPT: Final = len(uids.REFERENCE_OFFSETS) - 2
#: Seconds between two checks of a kept process.
_IDLE: Final = 0.5
#: Maximum CPU time of a kept process: a constant in seconds plus a share of the elapsed time. More would disturb the
#: timing of other processes. Threads of libraries spin for a moment before they sleep.
_RESTLESS: Final = (4.0, 0.1)
#: Message of a sealed process once its seal is complete.
_SEALED: Final = b"sealed"
#: Seconds to wait for a killed process to exit. A process that hangs in a driver never exits.
_REAP: Final = 10.0
#: Seconds to wait for a sealed process's remaining child processes to exit.
_SWEEP: Final = 1.0
#: Seconds after which a process that closed its channel is killed.
_DYING: Final = 1.0
#: Harnesses by role. Other roles use a kernel's harness.
_HARNESSES: Final = {
    Role.REFERENCE: reference.ReferenceHarness,
    Role.COMPILED: reference.ReferenceHarness,
    Role.EXAMINED: examiner.Examiner,
    Role.TESTS: tester.Tester,
    Role.WATCHED: tester.Tester,
}
#: Roles whose program runs under a tool.
_BELOW_A_TOOL: Final = frozenset({Role.EXAMINED, Role.WATCHED})
#: Ends that are not logged.
_QUIET_ENDS: Final = frozenset({End.STOPPED, End.EXITED})
#: Ends that are the host's fault, and are logged as warnings.
_OUR_TROUBLE: Final = frozenset({End.KILLED, End.STUCK, End.UNSEALED})


@dataclass(slots=True)
class _Budget:
    """The remaining seconds for a phase and for compilation. One of them decreases while the process is working."""

    phase: float = 0.0
    compile: float = 0.0
    running: bool = False
    meter: pauses.Meter = field(default_factory=pauses.Meter)

    def spend(self, compiling: bool) -> str | None:
        """Subtract the time since the last call, without pauses of the fleet. Return the exhausted budget, or None."""
        passed = self.meter.look()
        if not self.running:
            return None
        if compiling:
            self.compile -= passed
            return "compile" if self.compile <= 0 else None
        self.phase -= passed
        return "phase" if self.phase <= 0 else None

    def left(self, compiling: bool) -> float | None:
        """Return the seconds until a budget is exhausted, or None while the clock is stopped."""
        if not self.running:
            return None
        return self.compile if compiling else self.phase


class _Sealed:
    """The fork server's state of one running sealed process."""

    def __init__(
        self,
        pid: int,
        profile: seal.Profile,
        group: Group | None,
        control: socket.socket,
        page: memoryview[int],
        output: int,
        files: Files,
        about: dict[str, str | int],
    ) -> None:
        self.pid = pid
        self.about = about
        self.profile = profile
        self.files = files
        self.group = group
        self.control = control
        self.flags = page
        self.output = output
        self.phase = "load"
        self.budget = _Budget()
        self.peak = 0
        #: CPU time in seconds of its reaped processes.
        self.reaped_s = 0.0
        #: Maximum observed CPU time in seconds of the process and all its descendants.
        self.used_s = 0.0
        self.written = 0
        self.tail = bytearray()
        self.unsealed = ""

    @property
    def compiling(self) -> bool:
        return self.flags[flags.COMPILING] != 0

    def heed(self, message: Compilers | Enter | Turn) -> None:
        """Apply the judge's message about phase, time limit or clock."""
        self.budget.spend(self.compiling)
        match message:
            case Compilers(seconds):
                self.budget.compile = seconds
            case Enter(phase, seconds):
                self.phase, self.budget.phase = phase, seconds
            case Turn(running):
                self.budget.running = running

    def overdue(self) -> str | None:
        """Return the phase whose deadline has passed, or None."""
        spent = self.budget.spend(self.compiling)
        return None if spent is None else ("compile" if spent == "compile" else self.phase)

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

    def exceeds_memory(self, orphans: list[int]) -> bool:
        """Return whether the process tree, orphans of it, and its files exceed the memory limit."""
        total = sum(map(linux.memory_bytes, self.tree(orphans)))
        self.peak = max(self.peak, total)
        return total + self.files.memory_bytes() > self.profile.host_memory_bytes

    def cpu_seconds(self, orphans: list[int]) -> float:
        """Return the CPU time in seconds of the process tree, including orphans of it.

        A control group counts all descendants. Without one, a process that is not reaped counts only while it runs.
        """
        counted = 0.0 if self.group is None else self.group.cpu_seconds() or 0.0
        living = sum(map(linux.cpu_seconds, self.tree(orphans)))
        self.used_s = max(self.used_s, counted, self.reaped_s + living)
        return self.used_s

    def reap(self, pid: int, flags: int = 0) -> int:
        """Reap a child that belongs to this process, and return its wait status."""
        reaped, status, used = os.wait4(pid, flags)
        if reaped:
            self.reaped_s += used.ru_utime + used.ru_stime
        return status

    def tree(self, orphans: list[int]) -> Iterator[int]:
        """Yield the pids of the process tree and of orphans of it."""
        todo = [self.pid, *self.own(orphans)]
        while todo:
            pid = todo.pop()
            yield pid
            todo += linux.children(pid)

    def own(self, orphans: list[int]) -> list[int]:
        """Return the orphans of this process. Without separate uids per sealed process, return all orphans."""
        uid = self.profile.uid
        return orphans if uid is None else [pid for pid in orphans if linux.owner(pid) == uid]

    def out_of_memory(self) -> Lack | None:
        """Return the cause if Linux's out-of-memory killer ended a process of the group, else None."""
        return None if self.group is None else self.group.out_of_memory()


@dataclass(slots=True)
class _Kept:
    """A kept process that waits for its next evaluation.

    Attributes:
        request: the judge's request.
        descriptors: the judge's ends of its channel and control socket, its page of flags, and on a CPU its memory.
        since: monotonic time of the request.
        wanted: time stamp in nanoseconds of the file ``request.wanted`` at that time.
        worked: CPU time in seconds that the process had used at that time.
    """

    request: Keep
    descriptors: list[int]
    since: float = field(default_factory=time.monotonic)
    wanted: int = 0
    worked: float = 0.0

    def __post_init__(self) -> None:
        self.wanted = self.last_wanted()

    def last_wanted(self) -> int:
        """Return when another process last needed the memory, in nanoseconds of the file's clock, or 0 for never."""
        try:
            return Path(self.request.wanted).stat().st_mtime_ns
        except FileNotFoundError:
            return 0


class ForkServer:
    """The event loop. It runs until the parent closes the request socket."""

    def __init__(self, requests: socket.socket, base: self_check.SelfCheck, triton_files: dict[str, bytes]) -> None:
        self._requests = requests
        self._self_check = base
        self._launchers = Launchers(triton_files)
        self._selector = selectors.DefaultSelector()
        self._running: dict[int, _Sealed] = {}
        #: Kept processes, the longest waiting first.
        self._kept: list[_Kept] = []
        self._removals: list[subprocess.Popen[bytes]] = []
        self._looked = 0.0
        self._looked_at_kept = 0.0
        self._wake, writer = socket.socketpair()
        self._wake.setblocking(False)
        writer.setblocking(False)
        self._wake_writer = writer
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _nothing)
        self._register(requests, self._on_request)
        self._register(self._wake, self._on_wake)

    def run(self) -> None:
        """Serve until the parent is gone."""
        while self._requests.fileno() >= 0:
            for key, _ in self._selector.select(self._timeout()):
                key.data()
            self._watch()
        for process in list(self._running.values()):
            self._end(process, End.STOPPED)

    def _register(self, source: Any, callback: Callable[[], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, callback)

    def _timeout(self) -> float | None:
        if not self._running:
            return None
        if self._kept and len(self._running) == len(self._kept):
            return _IDLE
        lefts = [c.budget.left(c.compiling) for c in self._running.values()]
        return max(0.0, min([_WATCH, *(left for left in lefts if left is not None)]))

    def _watch(self) -> None:
        now = time.monotonic()
        look = now - self._looked >= _WATCH
        # Kept processes are idle and can be many, so they are checked less often.
        look_at_kept = now - self._looked_at_kept >= _IDLE
        waiting = {kept.request.scratch for kept in self._kept} if not look_at_kept else set[str]()
        orphans = self._orphans() if look and self._running else []
        for process in [p for p in self._running.values() if p.profile.scratch not in waiting]:
            if (phase := process.overdue()) is not None:
                process.phase = phase
                self._end(process, End.DEADLINE)
            elif look and process.exceeds_memory(orphans):
                self._end(process, End.MEMORY)
            elif look and (lack := process.out_of_memory()) is not None:
                self._end(process, End.MEMORY if lack is Lack.OWN else End.KILLED)
            elif look and process.files.overfull(process.tree([])):
                self._end(process, End.SCRATCH)
        if look:
            self._looked = now
        if look_at_kept:
            self._looked_at_kept = now
            for kept in [k for k in self._kept if self._is_over(k, now, orphans)]:
                self._end_kept(kept)

    def _is_over(self, kept: _Kept, now: float, orphans: list[int]) -> bool:
        """Return whether a kept process must end: its time is over, its memory is needed, or it uses CPU time."""
        due = now > kept.since + kept.request.seconds or kept.last_wanted() != kept.wanted
        return due or self._is_restless(kept, orphans)

    def _is_restless(self, kept: _Kept, orphans: list[int]) -> bool:
        """Return whether a kept process has used too much CPU time, or has exited."""
        process, (most, share) = self._process_of(kept), _RESTLESS
        if process is None:
            return True
        return process.cpu_seconds(orphans) - kept.worked > most + share * (time.monotonic() - kept.since)

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
                self._spawn(request, channel, socket.socket(fileno=control_end), page)
            case Keep() as request:
                self._keep(_Kept(request, fds))
            case Take() as request:
                with socket.socket(fileno=fds[0]) as answer:
                    self._hand_over(request, answer)

    def _process_of(self, kept: _Kept) -> _Sealed | None:
        """Return the kept process, if it still runs."""
        running = (c for c in self._running.values() if c.profile.scratch == kept.request.scratch)
        return next((c for c in running if not _has_ended(c.pid)), None)

    def _keep(self, kept: _Kept) -> None:
        """Keep a process. If there are too many references, end the one that waits longest."""
        self._kept.append(kept)
        process = self._process_of(kept)
        if process is None:
            self._end_kept(kept)
            return
        kept.worked = process.cpu_seconds(self._orphans())
        roles = ((each, self._process_of(each)) for each in self._kept)
        references = [each for each, process in roles if process and process.profile.role is Role.REFERENCE]
        if len(references) > _MOST_KEPT:
            self._end_kept(references[0])

    def _hand_over(self, request: Take, answer: socket.socket) -> None:
        """Send the process that is kept under a key to a judge, if there is one."""
        for kept in [kept for kept in self._kept if kept.request.key == request.key]:
            if (process := self._process_of(kept)) is not None:
                process.about = request.about
                reply = replace(kept.request, cpu_s=process.cpu_seconds(self._orphans()))
                with contextlib.suppress(OSError):  # the judge is gone, so the closed sockets below end the process
                    send_with_fds(answer, control.pack(reply), kept.descriptors)
                self._forget_kept(kept)
                return
            self._end_kept(kept)

    def _end_kept(self, kept: _Kept) -> None:
        process = self._process_of(kept)
        self._forget_kept(kept)
        if process is not None:
            self._end(process, End.STOPPED)

    def _forget_kept(self, kept: _Kept) -> None:
        self._kept.remove(kept)
        for descriptor in kept.descriptors:
            os.close(descriptor)

    def _on_wake(self) -> None:
        self._wake.recv(4096)
        self._launchers.look()
        self._removals = [removal for removal in self._removals if removal.poll() is None]
        for process in list(self._running.values()):
            if _has_ended(process.pid):
                self._conclude(process, End.EXITED)

    def _on_control(self, process: _Sealed) -> None:
        if process.pid not in self._running:
            return
        try:
            data = process.control.recv(65536)
        except ConnectionResetError:
            data = b""
        match control.unpack(data, (Compilers, Enter, Turn, Count, Stop, Closed)) if data else Stop():
            case Count():
                counted = Counted(process.cpu_seconds(self._orphans()))
                with contextlib.suppress(OSError):  # the judge is gone
                    process.control.send(control.pack(counted))
            case Closed():
                # The process is exiting, or pretends to. An exiting process releases the GPU last, which takes seconds
                # if many processes exit at once.
                begun = time.monotonic()
                while not _has_ended(process.pid) and time.monotonic() < begun + (
                    _REAP if linux.is_exiting(process.pid) else _DYING
                ):
                    time.sleep(0.001)
                self._end(process, End.CLOSED)
            case Stop():
                self._end(process, End.STOPPED)
            case message:
                process.heed(message)

    def _on_output(self, process: _Sealed) -> None:
        if process.pid not in self._running:
            return
        if not process.read_output():
            self._selector.unregister(process.output)
        elif process.written > process.profile.output_bytes:
            self._end(process, End.OUTPUT)

    def _spawn(self, request: Spawn, channel: int, control_end: socket.socket, page: int) -> None:
        profile = request.profile
        reader, writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reader, False)
        sealed, sealing = os.pipe2(os.O_CLOEXEC)
        parent = os.getpid()
        files: Files | None = None
        group: Group | None = None
        try:
            profile = self._with_uid(profile)
            means = self._means(profile.role)
            # Processes are killed by uid, so an earlier judge's process with the same uid must end first.
            for earlier in [
                c for c in self._running.values() if profile.uid is not None and c.profile.uid == profile.uid
            ]:
                self._end(earlier, End.STOPPED)
            files = Files(profile, means.covers)
            group = self._self_check.groups.group(profile.host_memory_bytes, profile.processes)
            pid = os.fork()
        except OSError as error:
            if group is not None:
                group.remove()
            if files is not None:
                self._remove(files)
            # No disk space, process or uid is available, which is the host's fault. The judge gets a report.
            for descriptor in (channel, page, reader, writer, sealed, sealing):
                os.close(descriptor)
            _log.error(
                "a sealed process could not be forked", role=str(profile.role), reason=str(error), **request.about
            )
            _send(control_end, Report(End.UNSEALED, "load", None, 0, 0, 0, str(error)))
            return
        if pid == 0:
            # A kernel can read all objects that are reachable from its callers' frames.
            for each in (request, *self._running.values()):
                each.about.clear()
            triton_files = self._launchers.files if profile.role is Role.CANDIDATE else {}
            _become_sealed(profile, means, group, parent, channel, page, writer, sealing, files.mount, triton_files)
        view: Any = flags.attach(page)
        # Otherwise the next sealed process would inherit the mapping of this one's flags.
        view.obj.madvise(mmap.MADV_DONTFORK)
        process = _Sealed(pid, profile, group, control_end, view, reader, files, request.about)
        for descriptor in (channel, page, writer, sealing):
            os.close(descriptor)
        self._running[pid] = process
        # This is read before any of the kernel's code runs, so that no kernel can pretend that its seal failed.
        message = b""
        while select.select([sealed], [], [], _REAP)[0] and (data := os.read(sealed, 4096)):
            message += data
        os.close(sealed)
        process.unsealed = "" if message == _SEALED else message.decode("utf-8", "replace") or "it did not answer"
        self._register(control_end, lambda: self._on_control(process))
        self._register(reader, lambda: self._on_output(process))
        if process.unsealed:
            self._end(process, End.UNSEALED)

    def _means(self, role: Role) -> seal.Means:
        """Return the means for the seal of a role. Raise OSError if this host lacks them."""
        if role not in _BELOW_A_TOOL:
            return self._self_check.means
        if isinstance(self._self_check.examining, str):
            raise OSError(self._self_check.examining)
        return self._self_check.examining

    def _with_uid(self, profile: seal.Profile) -> seal.Profile:
        """Replace the slot's uid by a free one for a reference. Raise OSError if all are in use."""
        if profile.uid is None or profile.role is not Role.REFERENCE:
            return profile
        used = {process.profile.uid for process in self._running.values()}
        free = (uid for offset in uids.REFERENCE_OFFSETS if (uid := profile.uid + offset) not in used)
        if (uid := next(free, None)) is None:
            raise OSError("all uids of references are in use")
        return replace(profile, uid=uid)

    def _end(self, process: _Sealed, reason: End) -> None:
        """Kill a sealed process and report its end. The reason is ``EXITED`` if it has ended already."""
        if _has_ended(process.pid):
            self._conclude(process, End.EXITED)
            return
        os.kill(process.pid, signal.SIGKILL)
        begun = time.monotonic()
        _await_end(process.pid, _DYING)
        while not _has_ended(process.pid):
            if time.monotonic() > begun + _DYING:
                # A process that one of its descendants traces can be reaped only after the tracer's end.
                self._kill_all_of(process)
            if time.monotonic() > begun + _REAP:
                reason = End.STUCK
                break
            time.sleep(0.0005)
        self._conclude(process, reason)

    def _conclude(self, process: _Sealed, reason: End) -> None:
        """Kill the remaining processes of an ended process, report its end, and remove its files."""
        leftovers = process.own(self._orphans())
        self._kill_all_of(process)
        if reason is End.STUCK:
            process.cpu_seconds(leftovers)
        status = None if reason is End.STUCK else process.reap(process.pid)
        if reason in {End.CLOSED, End.DEADLINE} and status is not None and os.WTERMSIG(status) != signal.SIGKILL:
            reason = End.EXITED  # it was already exiting before it was killed
        lack = process.out_of_memory()
        if reason is End.EXITED:
            if lack is Lack.OWN:
                reason = End.MEMORY
            elif lack is Lack.OTHERS or (status is not None and self._was_killed(status)):
                reason = End.KILLED
        del self._running[process.pid]
        self._sweep(process)
        # The number of reads is bounded, because a surviving process could write forever.
        for _ in range(64):
            if not process.read_output():
                break
        if process.output in self._selector.get_map():
            self._selector.unregister(process.output)
        self._selector.unregister(process.control)
        os.close(process.output)
        if reason is not End.SCRATCH:  # otherwise the size is measured already, and unlinked files can be gone
            process.files.weigh(process.tree([]))
        profile = process.profile
        if profile.role is Role.BUILDER and profile.built is not None and status is not None:
            owner = os.geteuid() if profile.uid is None else profile.uid
            shelf.take(process.files.root, Path(profile.built), owner, profile.file_bytes)
        elif profile.role is Role.CANDIDATE:
            owner = os.geteuid() if profile.uid is None else profile.uid
            self._launchers.learn(process.files.root / harness.LAUNCHED, owner)
        report = Report(
            reason=End.UNSEALED if process.unsealed else reason,
            phase=process.phase,
            status=status,
            leftovers=len(leftovers),
            peak_bytes=process.peak,
            output_bytes=process.written,
            log=process.unsealed or process.tail.decode("utf-8", "replace"),
            scratch_bytes=process.files.bytes,
            robbed=lack is Lack.OTHERS,
            cpu_s=max(process.used_s, process.reaped_s),
            limit_bytes={
                End.MEMORY: profile.host_memory_bytes,
                End.OUTPUT: profile.output_bytes,
                End.SCRATCH: profile.scratch_bytes,
            }.get(reason, 0),
        )
        _send(process.control, report)
        _log_end(process, report)
        self._remove(process.files)

    def _remove(self, files: Files) -> None:
        for directory in files.release():
            with contextlib.suppress(OSError):
                self._removals.append(linux.start_removal(directory))

    def _was_killed(self, status: int) -> bool:
        """Return whether SIGKILL from outside ended a process. With seccomp it cannot send the signal to itself."""
        by_kill = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        return by_kill and self._self_check.measures["seccomp"] is True

    def _orphans(self) -> list[int]:
        """Return the running children that are orphans of sealed processes."""
        own = self._own()
        return [pid for pid in linux.children(os.getpid()) if pid not in own and not linux.is_zombie(pid)]

    def _own(self) -> set[int]:
        """Return the children that are sealed processes or helpers of the fork server."""
        return {*self._running, *(removal.pid for removal in self._removals), *self._launchers.pids}

    def _kill_all_of(self, process: _Sealed) -> None:
        """Kill all processes of a sealed process, by control group or uid, and as orphans."""
        # Killing by uid needs a fork, so it is skipped after a kill by control group. A sweep detects survivors.
        killed = process.group is not None and process.group.kill()
        # The process must not be reaped yet. Until then no other process group can have the same number.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        if process.profile.uid is not None and not killed:
            _kill_uid(process.profile.uid)
        for pid in process.own(self._orphans()):
            os.kill(pid, signal.SIGKILL)

    def _sweep(self, process: _Sealed) -> None:
        """Kill and reap the process's orphans and all processes of its uid, within a bounded time."""
        deadline = time.monotonic() + _SWEEP
        while time.monotonic() < deadline:
            own = self._own()
            for pid in [pid for pid in linux.children(os.getpid()) if pid not in own and linux.is_zombie(pid)]:
                owners = [each for each in (process, *self._running.values()) if each.own([pid])]
                (owners or [process])[0].reap(pid, os.WNOHANG)
            # Orphans of other running processes are not killed. They count as leftovers when those processes end.
            orphans = process.own(self._orphans())
            for pid in orphans:
                os.kill(pid, signal.SIGKILL)
                process.reap(pid, os.WNOHANG)
            uid = process.profile.uid
            survivors = linux.living_of_uid(uid) if uid is not None else []
            if uid is not None and survivors:
                _kill_uid(uid)
            if not orphans and not survivors:
                break
            time.sleep(0.0005)
        if process.group is not None:
            process.used_s = max(process.used_s, process.group.cpu_seconds() or 0.0)
            process.group.remove()


def _send(control_end: socket.socket, report: Report) -> None:
    with contextlib.suppress(OSError):  # the judge is gone
        control_end.send(control.pack(report))
    control_end.close()


def _nothing(*_: object) -> None:
    """Do nothing. A signal needs a Python handler to wake the event loop."""


def _has_ended(pid: int) -> bool:
    """Return whether a child has ended, without reaping it."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _await_end(pid: int, seconds: float) -> None:
    """Wait for a child's end, which is delayed until the driver has freed its GPU memory."""
    descriptor, ended = os.pidfd_open(pid), select.poll()
    try:
        ended.register(descriptor, select.POLLIN)
        ended.poll(seconds * 1000)
    finally:
        os.close(descriptor)


def _kill_uid(uid: int) -> None:
    """Kill all processes of a uid at once, because a loop over pids would race with their forks."""
    try:
        pid = os.fork()
    except OSError:
        return  # without a process for this, the known processes are killed one by one
    if pid == 0:
        # Only the effective uid is the processes' uid, so this process can signal them, and they can neither signal nor
        # trace it.
        try:
            killer = uid + uids.KILLER_OFFSET
            os.setresuid(killer, uid, killer)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    deadline = time.monotonic() + _SWEEP
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.0002)


def _log_end(process: _Sealed, report: Report) -> None:
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


def _become_sealed(
    profile: seal.Profile,
    means: seal.Means,
    group: Group | None,
    parent: int,
    channel: int,
    page: int,
    output: int,
    sealing: int,
    mount: int | None,
    triton_files: dict[str, bytes],
) -> NoReturn:
    """Seal the forked process, report that, then serve the judge until it closes the channel."""
    status = 70
    try:
        logs.forget()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        try:
            seal.apply(profile, means, group, parent, {channel, page, sealing}, mount)
        except Exception as error:
            os.write(sealing, f"{type(error).__name__}: {error}".encode()[:4096])
            raise
        prewarm.put(triton_files)
        os.write(sealing, _SEALED)
        os.close(sealing)
        linux.set_name(f"kq-{profile.role}")
        kind = _HARNESSES.get(profile.role, harness.Harness)
        harness.serve(socket.socket(fileno=channel), flags.attach(page), kind)
        status = 0
    except BaseException:  # noqa: BLE001 -- no exception must reach the parent's loop in the frames above
        traceback.print_exc()
    finally:
        linux.leave(status)


def main(requests: socket.socket, parent: int, uid: int | None) -> NoReturn:
    """Run a slot's fork server in a new child of ``parent``, with which it ends, after :func:`harness.preload`.

    ``uid`` is the slot's uid for sealed processes. Processes that an earlier user of the uid left are killed.
    """
    os.setsid()
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    linux.set_name("kq-forkserver")
    linux.keep_freed_memory()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # this process ends only with its parent
    base = self_check.prepare(uid, os.environ.get("CUDA_VISIBLE_DEVICES"))
    # Entering a namespace can clear this setting.
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    if uid is not None and base.measures["own_uid"] is True:
        for leftover in uids.all_of(uid):
            _kill_uid(leftover)
    logs.configure_early()
    # Imported libraries have threads, but none of them holds a lock while they are idle.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    triton_files = prewarm.prepare()
    gc.freeze()
    status = 1
    try:
        requests.send(json.dumps(base.report() | {"torch": torch.__version__}).encode())
        ForkServer(requests, base, triton_files).run()
        base.groups.close()
        status = 0
    except Exception:  # noqa: BLE001 -- no exception must reach the parent's frames
        _log.exception("the fork server failed")
    finally:
        linux.leave(status)  # skips libraries' destructors, which would print errors
