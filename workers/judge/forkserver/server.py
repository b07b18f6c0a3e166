"""The fork server: the trusted parent of a slot's sealed processes, preloaded, with nothing worth stealing.

The slot's worker process forks it (:mod:`workers.start`) before it has read any secret and after it has imported torch
and Triton. It never touches CUDA. It forks a sealed process whenever the judge asks, watches it, and is the one place
where one is ended: at a phase's deadline; beyond its memory, output or files; when the judge says so; when the judge is
gone. It then sweeps whatever the process left behind, and reports. It also keeps references, and a candidate that knows
nothing yet, for later evaluations.

The words that it takes and gives are in :mod:`workers.judge.forkserver.control`.
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

#: What is kept of a process's output, in bytes.
_TAIL: Final = 16 << 10
#: How often a living process's memory is looked at, in seconds.
_WATCH: Final = 0.04
#: References that are kept at once. One more than that may be at work: each has a uid of its own.
_MOST_KEPT: Final = len(uids.REFERENCE_OFFSETS) - 2
#: The time between looks at a reference that is kept, in seconds.
_IDLE: Final = 0.5
#: The most that a process may work while it is kept, in seconds of a CPU and as a share of the time: others are timed
#: meanwhile. Libraries' threads spin for a moment before they sleep.
_RESTLESS: Final = (4.0, 0.1)
#: What a sealed process says of itself once it is sealed.
_SEALED: Final = b"sealed"
#: How long a killed process may take to go, in seconds; a process stuck in a driver takes for ever.
_REAP: Final = 10.0
#: How long what a sealed process left may take to go, in seconds.
_SWEEP: Final = 1.0
#: How long a process may live on that has closed the channel, in seconds.
_DYING: Final = 1.0
#: What obeys in each role; in others a kernel's own harness.
_HARNESSES: Final = {
    Role.REFERENCE: reference.ReferenceHarness,
    Role.COMPILED: reference.ReferenceHarness,
    Role.EXAMINED: examiner.Examiner,
    Role.TESTS: tester.Tester,
    Role.WATCHED: tester.Tester,
}
#: Roles whose program a tool watches.
_BELOW_A_TOOL: Final = frozenset({Role.EXAMINED, Role.WATCHED})
#: Ends that the log does not tell, and those that are the host's trouble.
_QUIET_ENDS: Final = frozenset({End.STOPPED, End.EXITED})
_OUR_TROUBLE: Final = frozenset({End.KILLED, End.STUCK, End.UNSEALED})


@dataclass(slots=True)
class _Budget:
    """Seconds left for a phase and for compilation; one of them runs while the process is at work."""

    phase: float = 0.0
    compile: float = 0.0
    running: bool = False
    meter: pauses.Meter = field(default_factory=pauses.Meter)

    def spend(self, compiling: bool) -> str | None:
        """Take the time since the last call, pauses left out, from the budget; what ran out, if anything did."""
        passed = self.meter.look()
        if not self.running:
            return None
        if compiling:
            self.compile -= passed
            return "compile" if self.compile <= 0 else None
        self.phase -= passed
        return "phase" if self.phase <= 0 else None

    def left(self, compiling: bool) -> float | None:
        """Seconds until :meth:`spend` reports something; None for never."""
        if not self.running:
            return None
        return self.compile if compiling else self.phase


class _Sealed:
    """One living sealed process, as its parent sees it."""

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
        #: The CPU time of what was reaped of it, in seconds, and the most that its tree was seen to have used.
        self.reaped_s = 0.0
        self.used_s = 0.0
        self.written = 0
        self.tail = bytearray()
        self.unsealed = ""

    @property
    def compiling(self) -> bool:
        return self.flags[flags.COMPILING] != 0

    def heed(self, word: Compilers | Enter | Turn) -> None:
        """Take the judge's word on phase, budget and whose turn it is."""
        self.budget.spend(self.compiling)
        match word:
            case Compilers(seconds):
                self.budget.compile = seconds
            case Enter(phase, seconds):
                self.phase, self.budget.phase = phase, seconds
            case Turn(running):
                self.budget.running = running

    def overdue(self) -> str | None:
        """The phase whose deadline has passed."""
        spent = self.budget.spend(self.compiling)
        return None if spent is None else ("compile" if spent == "compile" else self.phase)

    def read_output(self) -> bool:
        """Take what was written and keep its tail; False at the end."""
        try:
            data = os.read(self.output, 65536)
        except BlockingIOError:
            return False
        self.written += len(data)
        self.tail += data
        del self.tail[:-_TAIL]
        return bool(data)

    def exceeds_memory(self, orphans: list[int]) -> bool:
        """Return whether the process tree, the orphans that have left it, and its files have more than they may."""
        total = sum(map(linux.memory_bytes, self.tree(orphans)))
        self.peak = max(self.peak, total)
        return total + self.files.memory_bytes() > self.profile.host_memory_bytes

    def cpu_seconds(self, orphans: list[int]) -> float:
        """The CPU's time that the process tree has used, in seconds; that of orphans that have left it too.

        A group counts all of it. Without one, what nobody has waited for is counted while it lives.
        """
        counted = 0.0 if self.group is None else self.group.cpu_seconds() or 0.0
        living = sum(map(linux.cpu_seconds, self.tree(orphans)))
        self.used_s = max(self.used_s, counted, self.reaped_s + living)
        return self.used_s

    def reap(self, pid: int, flags: int = 0) -> int:
        """Reap a child that is of this process, if it has ended; return its status."""
        reaped, status, used = os.wait4(pid, flags)
        if reaped:
            self.reaped_s += used.ru_utime + used.ru_stime
        return status

    def tree(self, orphans: list[int]) -> Iterator[int]:
        """Yield the processes of the tree, and those orphans that have left it."""
        todo = [self.pid, *self.own(orphans)]
        while todo:
            pid = todo.pop()
            yield pid
            todo += linux.children(pid)

    def own(self, orphans: list[int]) -> list[int]:
        """Return the orphans that are this process's; all of them where no uids tell sealed processes apart."""
        uid = self.profile.uid
        return orphans if uid is None else [pid for pid in orphans if linux.owner(pid) == uid]

    def out_of_memory(self) -> Lack | None:
        """Return for whose want of memory Linux has ended something of it; None if it has not, or does not tell."""
        return None if self.group is None else self.group.out_of_memory()


@dataclass(slots=True)
class _Kept:
    """A process that waits for its next evaluation.

    Attributes:
        word: what was said of it when it was left.
        descriptors: the judge's ends of its channel and control socket, its page of flags, and on a CPU its memory.
        since: when it was left, by the monotonic clock.
        wanted: when its memory had last been wanted by then, in nanoseconds of the file's clock.
        worked: the CPU's time that its processes had used by then, in seconds.
    """

    word: Keep
    descriptors: list[int]
    since: float = field(default_factory=time.monotonic)
    wanted: int = 0
    worked: float = 0.0

    def __post_init__(self) -> None:
        """See when its memory was wanted before."""
        self.wanted = self.last_wanted()

    def last_wanted(self) -> int:
        """Return when its memory was last wanted, in nanoseconds of the file's clock; 0 for never."""
        try:
            return Path(self.word.wanted).stat().st_mtime_ns
        except FileNotFoundError:
            return 0


class ForkServer:
    """The loop. One instance lives in the process, until its parent closes the request socket."""

    def __init__(self, requests: socket.socket, base: self_check.SelfCheck, triton_files: dict[str, bytes]) -> None:
        self._requests = requests
        self._self_check = base
        self._launchers = Launchers(triton_files)
        self._selector = selectors.DefaultSelector()
        self._running: dict[int, _Sealed] = {}
        #: Processes that wait for their next evaluation, the longest waiting first.
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
        # Those that are kept do nothing, and may be many.
        look_at_kept = now - self._looked_at_kept >= _IDLE
        waiting = {kept.word.scratch for kept in self._kept} if not look_at_kept else set[str]()
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
        """Return whether a process has been kept for long enough, is in the way, or works all the same."""
        due = now > kept.since + kept.word.seconds or kept.last_wanted() != kept.wanted
        return due or self._is_restless(kept, orphans)

    def _is_restless(self, kept: _Kept, orphans: list[int]) -> bool:
        """Return whether a process that is kept has worked all the same."""
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
        asked = control.unpack(data, (Spawn, Keep, Take))
        del data  # what is forked below could read it
        match asked:
            case Spawn() as word:
                channel, control_end, page = fds
                self._spawn(word, channel, socket.socket(fileno=control_end), page)
            case Keep() as word:
                self._keep(_Kept(word, fds))
            case Take() as word:
                with socket.socket(fileno=fds[0]) as answer:
                    self._hand_over(word, answer)

    def _process_of(self, kept: _Kept) -> _Sealed | None:
        """Return the process that is kept, if it still runs."""
        running = (c for c in self._running.values() if c.profile.scratch == kept.word.scratch)
        return next((c for c in running if not _has_ended(c.pid)), None)

    def _keep(self, kept: _Kept) -> None:
        """Keep a process; end the reference that waits longest where there are too many."""
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

    def _hand_over(self, word: Take, answer: socket.socket) -> None:
        """Give the process that is kept under a key to a judge, or nothing."""
        for kept in [kept for kept in self._kept if kept.word.key == word.key]:
            if (process := self._process_of(kept)) is not None:
                process.about = word.about
                told = replace(kept.word, cpu_s=process.cpu_seconds(self._orphans()))
                with contextlib.suppress(OSError):  # else the judge is gone, and its end of the sockets is closed below
                    send_with_fds(answer, control.pack(told), kept.descriptors)
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
                # It is dying, or wants to be taken for it. The dead give a GPU back last, which takes seconds where
                # many do.
                begun = time.monotonic()
                while not _has_ended(process.pid) and time.monotonic() < begun + (
                    _REAP if linux.is_exiting(process.pid) else _DYING
                ):
                    time.sleep(0.001)
                self._end(process, End.CLOSED)
            case Stop():
                self._end(process, End.STOPPED)
            case word:
                process.heed(word)

    def _on_output(self, process: _Sealed) -> None:
        if process.pid not in self._running:
            return
        if not process.read_output():
            self._selector.unregister(process.output)
        elif process.written > process.profile.output_bytes:
            self._end(process, End.OUTPUT)

    def _spawn(self, word: Spawn, channel: int, control_end: socket.socket, page: int) -> None:
        profile = word.profile
        reader, writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reader, False)
        sealed, sealing = os.pipe2(os.O_CLOEXEC)
        parent = os.getpid()
        files: Files | None = None
        group: Group | None = None
        try:
            profile = self._with_uid(profile)
            means = self._means(profile.role)
            # What an earlier judge left has its uid, by which it is killed as a whole: it must be gone before.
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
            # No space, no process, no uid to be had: the host's trouble. The judge hears of it and nothing was run.
            for descriptor in (channel, page, reader, writer, sealed, sealing):
                os.close(descriptor)
            _log.error("a sealed process cannot be had", role=str(profile.role), reason=str(error), **word.about)
            _send(control_end, Report(End.UNSEALED, "load", None, 0, 0, 0, str(error)))
            return
        if pid == 0:
            # A kernel can read what lies in the frames below its own, and in what they lead to.
            for one in (word, *self._running.values()):
                one.about.clear()
            triton_files = self._launchers.files if profile.role is Role.CANDIDATE else {}
            _become_sealed(profile, means, group, parent, channel, page, writer, sealing, files.mount, triton_files)
        view: Any = flags.attach(page)
        # Else the next process to be forked, this one's rival, would have it too.
        view.obj.madvise(mmap.MADV_DONTFORK)
        process = _Sealed(pid, profile, group, control_end, view, reader, files, word.about)
        for descriptor in (channel, page, writer, sealing):
            os.close(descriptor)
        self._running[pid] = process
        # Before any of the kernel's code runs, so that no kernel can claim that its seal had failed.
        said = b""
        while select.select([sealed], [], [], _REAP)[0] and (more := os.read(sealed, 4096)):
            said += more
        os.close(sealed)
        process.unsealed = "" if said == _SEALED else said.decode("utf-8", "replace") or "it did not answer"
        self._register(control_end, lambda: self._on_control(process))
        self._register(reader, lambda: self._on_output(process))
        if process.unsealed:
            self._end(process, End.UNSEALED)

    def _means(self, role: Role) -> seal.Means:
        """Return the means for the seal of a role.

        Raises:
            OSError: this host does not have them.
        """
        if role not in _BELOW_A_TOOL:
            return self._self_check.means
        if isinstance(self._self_check.examining, str):
            raise OSError(self._self_check.examining)
        return self._self_check.examining

    def _with_uid(self, profile: seal.Profile) -> seal.Profile:
        """Give a reference a uid of its own: the judge names the slot's.

        Raises:
            OSError: all of them are taken.
        """
        if profile.uid is None or profile.role is not Role.REFERENCE:
            return profile
        used = {process.profile.uid for process in self._running.values()}
        free = (uid for offset in uids.REFERENCE_OFFSETS if (uid := profile.uid + offset) not in used)
        if (uid := next(free, None)) is None:
            raise OSError("more references are at work than there are uids for")
        return replace(profile, uid=uid)

    def _end(self, process: _Sealed, reason: End) -> None:
        """Kill a sealed process and conclude it. If it had ended already, by itself, that is what counts."""
        if _has_ended(process.pid):
            self._conclude(process, End.EXITED)
            return
        os.kill(process.pid, signal.SIGKILL)
        begun = time.monotonic()
        _await_end(process.pid, _DYING)
        while not _has_ended(process.pid):
            if time.monotonic() > begun + _DYING:
                # One that is traced by its own offspring ends for us only when the tracer does.
                self._kill_all_of(process)
            if time.monotonic() > begun + _REAP:
                reason = End.STUCK
                break
            time.sleep(0.0005)
        self._conclude(process, reason)

    def _conclude(self, process: _Sealed, reason: End) -> None:
        """Sweep what an ended process left, report, and forget it."""
        leftovers = process.own(self._orphans())
        self._kill_all_of(process)
        if reason is End.STUCK:
            process.cpu_seconds(leftovers)
        status = None if reason is End.STUCK else process.reap(process.pid)
        if reason in {End.CLOSED, End.DEADLINE} and status is not None and os.WTERMSIG(status) != signal.SIGKILL:
            reason = End.EXITED  # it was on its way out, by itself, before it was killed
        lack = process.out_of_memory()
        if reason is End.EXITED:
            if lack is Lack.OWN:
                reason = End.MEMORY
            elif lack is Lack.OTHERS or (status is not None and self._was_killed(status)):
                reason = End.KILLED
        del self._running[process.pid]
        self._sweep(process)
        # What a survivor might still write is not waited for.
        for _ in range(64):
            if not process.read_output():
                break
        if process.output in self._selector.get_map():
            self._selector.unregister(process.output)
        self._selector.unregister(process.control)
        os.close(process.output)
        if reason is not End.SCRATCH:  # else what it held has been seen, and may be gone with it
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
        _tell(process, report)
        self._remove(process.files)

    def _remove(self, files: Files) -> None:
        for directory in files.release():
            with contextlib.suppress(OSError):
                self._removals.append(linux.start_removal(directory))

    def _was_killed(self, status: int) -> bool:
        """Return whether a process that nobody here has killed was ended by SIGKILL, and cannot have sent it itself."""
        by_kill = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        return by_kill and self._self_check.measures["seccomp"] is True

    def _orphans(self) -> list[int]:
        """Return living children that are neither sealed processes nor ours: sealed processes have left them behind."""
        own = self._own()
        return [pid for pid in linux.children(os.getpid()) if pid not in own and not linux.is_zombie(pid)]

    def _own(self) -> set[int]:
        """Return the children that are sealed processes or work for this one."""
        return {*self._running, *(removal.pid for removal in self._removals), *self._launchers.pids}

    def _kill_all_of(self, process: _Sealed) -> None:
        """Kill whatever is a process's by group, by uid or as an orphan. Its own pid must not be reaped yet.

        What Linux kills as a group is not killed by uid too, which takes a fork: a sweep sees whether anything is left.
        """
        killed = process.group is not None and process.group.kill()
        # While it is not reaped its pid, and so its group's number, cannot be a stranger's.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        if process.profile.uid is not None and not killed:
            _kill_uid(process.profile.uid)
        for pid in process.own(self._orphans()):
            os.kill(pid, signal.SIGKILL)

    def _sweep(self, process: _Sealed) -> None:
        """Kill and reap all orphans, and theirs, within a bounded time; all of the process's uid with them."""
        deadline = time.monotonic() + _SWEEP
        while time.monotonic() < deadline:
            own = self._own()
            for pid in [pid for pid in linux.children(os.getpid()) if pid not in own and linux.is_zombie(pid)]:
                whose = [each for each in (process, *self._running.values()) if each.own([pid])]
                (whose or [process])[0].reap(pid, os.WNOHANG)
            # Not those of others that still run: they are leftovers when these end.
            mine = process.own(self._orphans())
            for pid in mine:
                os.kill(pid, signal.SIGKILL)
                process.reap(pid, os.WNOHANG)
            uid = process.profile.uid
            survivors = linux.living_of_uid(uid) if uid is not None else []
            if uid is not None and survivors:
                _kill_uid(uid)
            if not mine and not survivors:
                break
            time.sleep(0.0005)
        if process.group is not None:
            process.used_s = max(process.used_s, process.group.cpu_seconds() or 0.0)
            process.group.remove()


def _send(control_end: socket.socket, report: Report) -> None:
    with contextlib.suppress(OSError):  # the judge is gone, and with it everybody who would read this
        control_end.send(control.pack(report))
    control_end.close()


def _nothing(*_: object) -> None:
    """Do nothing: a signal with a handler wakes the loop instead of being ignored."""


def _has_ended(pid: int) -> bool:
    """Return whether a child has ended, without reaping it."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _await_end(pid: int, seconds: float) -> None:
    """Wait for a child's end, which takes as long as the driver does to take a GPU's memory back."""
    descriptor, ended = os.pidfd_open(pid), select.poll()
    try:
        ended.register(descriptor, select.POLLIN)
        ended.poll(seconds * 1000)
    finally:
        os.close(descriptor)


def _kill_uid(uid: int) -> None:
    """Kill every process of a uid at once, as a loop over pids would race with what forks.

    The killer has the uid as its effective one alone: it may signal the uid's processes, and they may neither
    signal nor trace it.
    """
    try:
        pid = os.fork()
    except OSError:
        return  # no process to be had now: those that are known are killed one by one
    if pid == 0:
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


def _tell(process: _Sealed, report: Report) -> None:
    """Log how a sealed process ended, unless the judge had it end or it has ended by itself. Its own words stay out."""
    if report.reason in _QUIET_ENDS:
        return
    say = _log.warning if report.reason in _OUR_TROUBLE else _log.info
    say(
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
    """In the child: seal, say so, then obey the judge until it goes."""
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
    except BaseException:  # noqa: BLE001 -- whatever it is, it must not reach the parent's loop above
        traceback.print_exc()
    finally:
        linux.leave(status)


def main(requests: socket.socket, parent: int, uid: int | None) -> NoReturn:
    """Become a slot's fork server, in a process freshly forked by ``parent`` after :func:`harness.preload`.

    Args:
        requests: what it serves.
        parent: the worker's process; it ends with that.
        uid: the slot's uid for sealed processes, which nobody else uses now: what an earlier holder left is killed.
    """
    os.setsid()
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    linux.set_name("kq-forkserver")
    linux.keep_freed_memory()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends when its parent does, not before
    base = self_check.prepare(uid, os.environ.get("CUDA_VISIBLE_DEVICES"))
    # Entering a namespace may have cleared it.
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    if uid is not None and base.measures["own_uid"] is True:
        for leftover in uids.all_of(uid):
            _kill_uid(leftover)
    logs.configure_early()
    # Libraries keep threads of their own after their import; none of them holds a lock while nothing runs.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    triton_files = prewarm.prepare()
    gc.freeze()
    status = 1
    try:
        requests.send(json.dumps(base.report() | {"torch": torch.__version__}).encode())
        ForkServer(requests, base, triton_files).run()
        base.groups.close()
        status = 0
    except Exception:  # noqa: BLE001 -- whatever it is, it must not reach what the parent was about to do
        _log.exception("the fork server failed")
    finally:
        linux.leave(status)  # libraries' destructors would only make noise
