"""Spawning of sealed processes: fork, seal, and serve the judge."""

from __future__ import annotations

import faulthandler
import mmap
import os
import platform
import select
import signal
import socket
import traceback
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, Final, NamedTuple, NoReturn

import structlog

from kqueue import logs, shapes
from workers.judge.candidate import examiner, harness, reference, tester
from workers.judge.channel import flags
from workers.judge.forkserver import prewarm
from workers.judge.forkserver.control import End, Report, Spawn
from workers.judge.forkserver.files import Files
from workers.judge.forkserver.launchers import Launchers
from workers.judge.forkserver.watch import REAP, Sealed, Watch, send_report
from workers.judge.host import linux, uids
from workers.judge.sandbox import namespaces, reach, seal, seccomp
from workers.judge.sandbox.cgroups import Group
from workers.judge.sandbox.seal import Profile, Role
from workers.judge.sandbox.self_check import SelfCheck

_log: Any = structlog.get_logger(__name__)

#: Message of a sealed process once its seal is complete.
_SEALED: Final = b"sealed"
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


class _Ends(NamedTuple):
    """The new process's descriptors: channel, page of flags, output, and the pipe on which it reports its seal."""

    channel: int
    page: int
    output: int
    sealing: int


class Spawner:
    """Forks sealed processes and hands them over to the watch."""

    def __init__(self, watch: Watch, self_check: SelfCheck, launchers: Launchers) -> None:
        self._watch = watch
        self._self_check = self_check
        self._launchers = launchers
        #: Descriptors of the network and the mounts of each group by its name, and the mounts that no member has.
        self._groups: dict[str, tuple[list[int], Iterator[int]]] = {}
        self._reach = cache(reach.for_group)

    def spawn(self, request: Spawn, channel: int, control_end: socket.socket, page: int) -> None:
        """Fork a process, and wait until it is sealed. ``channel`` is the process's end of the channel."""
        reader, writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reader, False)
        sealed, sealing = os.pipe2(os.O_CLOEXEC)
        ends, parent = _Ends(channel, page, writer, sealing), os.getpid()
        files: Files | None = None
        group: Group | None = None
        try:
            profile = self._with_uid(request.profile)
            means = self._means(profile)
            self._end_earlier(profile.uid)
            files = Files(profile, means.covers)
            group = self._self_check.groups.group(profile.host_memory_bytes, profile.processes)
            pid = os.fork()
        except OSError as error:
            if group is not None:
                group.remove()
            if files is not None:
                self._watch.children.remove(files)
            # No disk space, process or uid is available, which is the host's fault. The judge gets a report.
            for descriptor in (*ends, reader, sealed):
                os.close(descriptor)
            role = str(request.profile.role)
            _log.error("a sealed process could not be forked", role=role, reason=str(error), **request.about)
            send_report(control_end, Report(End.UNSEALED, "load", None, 0, 0, 0, str(error)))
            return
        if pid == 0:
            # A kernel can read all objects that are reachable from its callers' frames.
            for each in (request, *self._watch.running.values()):
                each.about.clear()
            triton_files = self._launchers.files if profile.role is Role.CANDIDATE else {}
            _become_sealed(profile, means, group, parent, ends, files.mount, triton_files)
        view: Any = flags.attach(page)
        # Otherwise the next sealed process would inherit the mapping of this one's flags.
        view.obj.madvise(mmap.MADV_DONTFORK)
        process = Sealed(pid, profile.uid, group, profile, files, control_end, view, reader, request.about)
        for descriptor in ends:
            os.close(descriptor)
        self._watch.running[pid] = process
        process.unsealed = _failure(sealed)
        self._watch.add(process)

    def _end_earlier(self, uid: int | None) -> None:
        """End an earlier judge's process with the same uid, because processes are killed by uid."""
        for earlier in [each for each in self._watch.running.values() if uid is not None and each.uid == uid]:
            self._watch.end(earlier, End.STOPPED)

    def _means(self, profile: Profile) -> seal.Means:
        """Return the means for the seal of a process. Raise OSError if this host lacks them."""
        if profile.role not in _BELOW_A_TOOL and not profile.group:
            return self._self_check.means
        if isinstance(self._self_check.examining, str):
            raise OSError(self._self_check.examining)
        if not profile.group:
            return self._self_check.examining
        # Its sockets reach only its group: the network is the group's own, and no path of another's socket is visible.
        return replace(
            self._self_check.examining,
            filter=seccomp.program(platform.machine(), connects=True, grouped=True),
            reach=self._reach(self._self_check.means.reach, profile.devices),
            group=self._joined(profile.group),
        )

    def _joined(self, group: str) -> tuple[int, int]:
        """Return descriptors of a group's network and a mount for one member, and forget groups that have ended."""
        used = {group, *(process.profile.group for process in self._watch.running.values())}
        for name in [name for name in self._groups if name not in used]:
            for descriptor in self._groups.pop(name)[0]:
                os.close(descriptor)
        if group not in self._groups:
            made = namespaces.for_group(shapes.MOST_RANKS)
            self._groups[group] = made, iter(made[1:])
        (network, *_), mounts = self._groups[group]
        return network, next(mounts)

    def _with_uid(self, profile: Profile) -> Profile:
        """Replace the slot's uid by a free one for a reference or a group. Raise OSError if all are in use."""
        if profile.uid is None or not (profile.group or profile.role is Role.REFERENCE):
            return profile
        used = {process.uid for process in self._watch.running.values()}
        free = (uid for offset in uids.REFERENCE_OFFSETS if (uid := profile.uid + offset) not in used)
        if (uid := next(free, None)) is None:
            raise OSError("all uids of references are in use")
        return replace(profile, uid=uid)


def _failure(sealed: int) -> str:
    """Wait for a new process's message about its seal, and close the pipe. Return the failure, or an empty string."""
    # This is read before any of the kernel's code runs, so that no kernel can pretend that its seal failed.
    message = b""
    while select.select([sealed], [], [], REAP)[0] and (data := os.read(sealed, 4096)):
        message += data
    os.close(sealed)
    return "" if message == _SEALED else message.decode("utf-8", "replace") or "it did not answer"


def _become_sealed(
    profile: Profile,
    means: seal.Means,
    group: Group | None,
    parent: int,
    ends: _Ends,
    mount: int | None,
    triton_files: dict[str, bytes],
) -> NoReturn:
    """Seal the forked process, report that, then serve the judge until it closes the channel."""
    status = 70
    try:
        logs.forget()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)  # these can be handled or ignored here
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(ends.output, 1)
        os.dup2(ends.output, 2)
        faulthandler.enable(2, all_threads=False)
        try:
            seal.apply(profile, means, group, parent, {ends.channel, ends.page, ends.sealing}, mount)
        except Exception as error:
            os.write(ends.sealing, f"{type(error).__name__}: {error}".encode()[:4096])
            raise
        prewarm.put(triton_files)
        os.write(ends.sealing, _SEALED)
        os.close(ends.sealing)
        linux.set_name(f"kq-{profile.role}")
        kind = _HARNESSES.get(profile.role, harness.Harness)
        harness.serve(socket.socket(fileno=ends.channel), flags.attach(ends.page), kind)
        status = 0
    except BaseException:  # noqa: BLE001 -- no exception must reach the parent's loop in the frames above
        traceback.print_exc()
    finally:
        linux.leave(status)
