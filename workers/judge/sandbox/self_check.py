"""Find out which sandboxing measures work on this host, by trying each one when a fork server starts."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import mmap
import os
import platform
import select
import signal
import socket
import sys
import tempfile
import termios
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

from workers.judge.host import linux
from workers.judge.sandbox import cgroups, landlock, level, mounts, namespaces, reach, seal, seccomp, view

#: Deadline of a trial. It initialises the GPU driver, which is slow if no other process has done so.
_TRIAL_S: Final = 60.0
#: The size of a trial's file system, in bytes.
_TRIAL_BYTES: Final = 1 << 20
_NO_LANDLOCK: Final = "this kernel has no Landlock, or it may not be used here"


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """The measures that work on this host.

    Attributes:
        means: the argument for :func:`workers.judge.sandbox.seal.apply`.
        examining: that argument for a program under a tool, or the reason why there is none.
        groups: creates the candidates' control groups.
        measures: for each measure of :data:`workers.judge.sandbox.level.MEASURES` True, or the reason why not.
        view: ``host``, or ``rebuilt`` if candidates see a private view of the file system.
    """

    means: seal.Means
    examining: seal.Means | str
    groups: cgroups.Groups
    measures: dict[str, bool | str]
    view: str

    def report(self) -> dict[str, Any]:
        """Return the isolation as verdicts record it."""
        return {**self.measures, "level": str(level.reached(self.measures)), "view": self.view}


def prepare(uid: int | None, visible: str | None) -> SelfCheck:
    """Try every measure. Apply to the calling process those that candidates inherit: view and namespaces.

    Args:
        uid: the candidates' uid; None if they keep the fleet's.
        visible: the candidates' ``CUDA_VISIBLE_DEVICES``.
    """
    measures: dict[str, bool | str] = {}
    shown = "host"
    if os.geteuid() == 0:
        try:
            if view.unreadable():
                view.rebuild()
                shown = "rebuilt"
            measures["own_uid"] = True if uid is not None else "none was given"
        except OSError as error:
            measures["own_uid"] = f"other users cannot reach the interpreter or its packages, and {error.strerror}"
    else:
        measures["own_uid"] = "the fleet is not root"
    measures |= namespaces.enter()
    found, pinned = reach.find(visible)
    wanted = seal.Means(landlock.abi(), _filter(), found, mounts.find(found.readable))
    if wanted.landlock < landlock.ABI_FILES:
        wanted = replace(wanted, landlock=0)
    means, tried = _most_that_works(wanted, uid if measures["own_uid"] is True else None)
    measures |= tried
    measures["gpu_nodes"] = pinned if measures["files"] is True else f"needs files: {measures['files']}"
    groups = cgroups.Groups()
    measures |= groups.measures
    measures = {name: measures[name] for name in level.MEASURES}
    return SelfCheck(means, _for_tools(means, measures), groups, measures, shown)


def _for_tools(means: seal.Means, measures: dict[str, bool | str]) -> seal.Means | str:
    """Return the means for a program under a tool: a few rights more, and so nothing of others in sight.

    The tool finds the program by a socket; and the driver names its threads in the program's own ``/proc``, which is
    not that of the sealed process. So sockets may be connected, where neither a path nor a name leads to anybody
    else's; and ``/proc`` may be used, where its uid owns nothing of others', and Landlock keeps their memory, files
    and environments from it all the same.

    Returns:
        the means, or why this host does not have them.
    """
    lacking = {name: measures[name] for name in ("own_uid", "seccomp", "files", "mounts") if measures[name] is not True}
    if measures["scopes"] is not True and measures["network_namespace"] is not True:
        lacking["scopes"] = measures["scopes"]
    if lacking:
        told = "; ".join(f"{name} ({why})" for name, why in lacking.items())
        return f"a program under a tool cannot be sealed here, for want of {told}"
    opened = replace(means.reach, readable=(*means.reach.readable, "/proc"), nodes=(*means.reach.nodes, "/proc"))
    return replace(
        means,
        filter=seccomp.program(platform.machine(), connects=True),
        reach=opened,
        covers=mounts.find_all(opened.readable),
    )


def _filter() -> bytes:
    try:
        return seccomp.program(platform.machine())
    except KeyError:
        return b""


def _most_that_works(wanted: seal.Means, uid: int | None) -> tuple[seal.Means, dict[str, bool | str]]:
    """Return the strongest seal with which the GPU, if any, can still be opened, and its measures.

    A driver that fails under a measure must not make every kernel fail: the measure is left out and reported.
    """
    means, tried = wanted, _trial(wanted, uid)
    if (refused := tried.pop("gpu", None)) is not None:
        by_landlock = ("files", "tcp", "devices", "scopes")
        for less, left_out in (
            (replace(wanted, covers=None), ("mounts",)),
            (replace(wanted, filter=b""), ("seccomp",)),
            (replace(wanted, landlock=0), by_landlock),
            (replace(wanted, landlock=0, filter=b""), ("seccomp", *by_landlock)),
            (replace(wanted, landlock=0, filter=b"", covers=None), ("seccomp", "mounts", *by_landlock)),
        ):
            again = _trial(less, uid)
            if again.pop("gpu", None) is None:
                means = less
                tried = again | dict.fromkeys(left_out, f"the GPU cannot be opened with it: {refused}")
                break
    if tried["mounts"] is not True:
        means = replace(means, covers=None)
    return means, tried


def _trial(means: seal.Means, uid: int | None) -> dict[str, bool | str]:
    """Seal a child process and let it try what the seal must forbid, and what it must allow.

    Returns:
        for each measure True, or the reason why it fails; as ``gpu`` the reason why the GPU cannot be opened, if so.
    """
    names = ("no_new_privs", "no_capabilities", "limits", "seccomp", "files", "mounts", "tcp", "devices", "scopes")
    bystander = _fork_bystander(uid)
    scratch = tempfile.mkdtemp()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _try_in_child(means, uid, bystander, scratch, writer)
    os.close(writer)
    data = b""
    while select.select([reader], [], [], _TRIAL_S)[0] and (more := os.read(reader, 65536)):
        data += more
    os.close(reader)
    for pid in (child, bystander):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    Path(scratch).rmdir()
    return json.loads(data) if data else dict.fromkeys(names, "the trial did not end")


def _fork_bystander(uid: int | None) -> int:
    """Fork an unsealed process of the same user. The sealed child must not be able to signal it."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            if uid is not None:
                seal.become(uid)
            linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
            while os.getppid() == parent:
                signal.pause()
        finally:
            os._exit(0)
    return pid


def _try_in_child(means: seal.Means, uid: int | None, bystander: int, scratch: str, writer: int) -> NoReturn:
    found: dict[str, bool | str] = {"mounts": "not tried"}
    try:
        if means.covers is not None:
            _note(found, "mounts", partial(_attach, means.covers, uid, scratch))
        _note(found, "limits", seal.limit)
        if uid is not None:
            seal.become(uid)
        _note(found, "no_capabilities", linux.drop_capabilities)
        _note(found, "no_new_privs", lambda: linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1))
        _try_landlock(found, means, bystander, scratch)
        _try_seccomp(found, means)
        if means.covers is not None and found["mounts"] is True:
            found["mounts"] = _use(means.covers, scratch)
        if means.reach.gpu_nodes and (why := _open_gpu()):
            found["gpu"] = why
    except BaseException as error:  # noqa: BLE001 -- told to the parent
        found = {name: f"{type(error).__name__}: {error}" for name in level.MEASURES} | found
    finally:
        os.write(writer, json.dumps(found).encode())
        os._exit(0)


def _note(found: dict[str, bool | str], name: str, call: Callable[[], object]) -> None:
    try:
        call()
        found[name] = True
    except OSError as error:
        found[name] = f"refused: {error.strerror}"


def _attach(covers: mounts.Covers, uid: int | None, scratch: str) -> None:
    owner = (os.geteuid(), os.getegid()) if uid is None else (uid, uid)
    covers.attach(covers.make(_TRIAL_BYTES, *owner), scratch)


def _use(covers: mounts.Covers, scratch: str) -> bool | str:
    """Return True if each directory is the trial's own, and takes a library that can be run; else the reason."""
    try:
        for directory in (scratch, *covers.directories):
            held = os.statvfs(directory)
            if held.f_blocks * held.f_frsize != _TRIAL_BYTES:
                return f"applied, but {directory} is another"
            with open(f"{directory}/library", "xb+") as library:  # noqa: PTH123
                library.truncate(mmap.PAGESIZE)
                mmap.mmap(library.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_EXEC).close()
    except OSError as error:
        return f"applied, but it cannot be used: {error.strerror}"
    return True


def _try_landlock(found: dict[str, bool | str], means: seal.Means, bystander: int, scratch: str) -> None:
    names = {"files": 1, "tcp": landlock.ABI_TCP, "devices": landlock.ABI_DEVICES, "scopes": landlock.ABI_SCOPES}
    if not means.landlock:
        version = landlock.abi()
        why = f"Landlock's interface {version} forbids renaming between directories" if version else _NO_LANDLOCK
        found |= dict.fromkeys(names, why)
        return
    try:
        tcp = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        tcp = None
    seal.restrict_files(means, scratch)
    attempts: dict[str, Callable[[], object]] = {
        "files": lambda: os.close(os.open("/", os.O_RDONLY)),
        # Nothing listens on port 1; if something did, the connection would close without a word.
        "tcp": lambda: tcp.connect(("127.0.0.1", 1)) if tcp else None,
        "devices": lambda: termios.tcgetattr(os.open("/dev/null", os.O_RDWR)),
        "scopes": lambda: os.kill(bystander, 0),
    }
    for name, since in names.items():
        if means.landlock < since:
            found[name] = f"needs version {since} of Landlock's interface; this kernel has {means.landlock}"
        else:
            found[name] = _is_refused(attempts[name])
    if tcp:
        tcp.close()


def _try_seccomp(found: dict[str, bool | str], means: seal.Means) -> None:
    if not means.filter:
        found["seccomp"] = f"unknown processor: {platform.machine()}"
        return
    _note(found, "seccomp", lambda: seccomp.enforce(means.filter))
    if found["seccomp"] is True:
        found["seccomp"] = _is_refused(socket.socket)


def _is_refused(attempt: Callable[[], object]) -> bool | str:
    try:
        attempt()
    except termios.error as error:
        code = error.args[0]
    except OSError as error:
        code = error.errno
    else:
        return "applied, but without effect"
    return True if code in (errno.EACCES, errno.EPERM) else f"applied, but the error was: {os.strerror(code or 0)}"


def _open_gpu() -> str:
    """Initialise CUDA in this process. Return an empty string, or the error."""
    try:
        code = int(ctypes.CDLL("libcuda.so.1").cuInit(0))
    except OSError:
        return ""  # a missing driver is reported elsewhere
    return f"cuInit returns {code}" if code else ""


def main() -> None:
    """Print a fork server's report as JSON. Arguments: the candidates' uid, or an empty string; their GPU's UUID.

    It runs in a forked child, because only a process with one thread can enter namespaces.
    """
    uid, visible = sys.argv[1:]
    child = os.fork()
    if child == 0:
        status = 1
        try:
            base = prepare(int(uid) if uid else None, visible)
            base.groups.close()
            sys.stdout.write(json.dumps(base.report()) + "\n")
            sys.stdout.flush()
            status = 0
        finally:
            os._exit(status)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


if __name__ == "__main__":
    main()
