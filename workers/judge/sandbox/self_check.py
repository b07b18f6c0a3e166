"""The self-check of the sandbox: try every measure on this host when a fork server starts."""

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

#: Time limit in seconds of a test. It initialises the GPU driver, which is slow if no other process has done so.
_TEST_S: Final = 60.0
#: Size in bytes of a test's file system.
_TEST_BYTES: Final = 1 << 20
_NO_LANDLOCK: Final = "this kernel has no Landlock, or does not allow its use"


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """The measures that work on this host.

    Attributes:
        means: argument for :func:`workers.judge.sandbox.seal.apply`.
        examining: that argument for a program under a tool, or the reason why there is none.
        groups: factory of the candidates' control groups.
        measures: for each measure of :data:`workers.judge.sandbox.level.MEASURES` True, or the reason for its absence.
        view: ``host``, or ``rebuilt`` if candidates have a private view of the file system.
    """

    means: seal.Means
    examining: seal.Means | str
    groups: cgroups.Groups
    measures: dict[str, bool | str]
    view: str

    def report(self) -> dict[str, Any]:
        """Return the isolation in the form that verdicts record."""
        return {**self.measures, "level": str(level.reached(self.measures)), "view": self.view}


def prepare(uid: int | None, visible: str | None) -> SelfCheck:
    """Try every measure. Apply the view and the namespaces to the calling process, because candidates inherit them.

    The candidates have ``uid``, or the fleet's if None, and ``visible`` as ``CUDA_VISIBLE_DEVICES``.
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
    paths, pinned = reach.find(visible)
    strongest = seal.Means(landlock.abi(), _filter(), paths, mounts.find(paths.readable))
    if strongest.landlock < landlock.ABI_FILES:
        strongest = replace(strongest, landlock=0)
    means, tried = _most_that_works(strongest, uid if measures["own_uid"] is True else None)
    measures |= tried
    measures["gpu_nodes"] = pinned if measures["files"] is True else f"needs files: {measures['files']}"
    groups = cgroups.Groups()
    measures |= groups.measures
    measures = {name: measures[name] for name in level.MEASURES}
    return SelfCheck(means, _for_tools(means, measures), groups, measures, shown)


def _for_tools(means: seal.Means, measures: dict[str, bool | str]) -> seal.Means | str:
    """Return the means for a program under a tool, or the reason why this host does not have them."""
    # The tool connects to the program through a socket, so local sockets can be connected. For safety, no path and no
    # name of another process's socket is visible. The driver names its threads in the program's own /proc entry, which
    # is not the sealed process's entry, so all of /proc is open. For safety, its uid owns no other process, and
    # Landlock protects the memory, files and environments of other processes.
    lacking = {name: measures[name] for name in ("own_uid", "seccomp", "files", "mounts") if measures[name] is not True}
    if measures["scopes"] is not True and measures["network_namespace"] is not True:
        lacking["scopes"] = measures["scopes"]
    if lacking:
        reasons = ", ".join(f"{name} ({why})" for name, why in lacking.items())
        return f"a process that connects to another cannot be sealed here, because it lacks {reasons}"
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


def _most_that_works(strongest: seal.Means, uid: int | None) -> tuple[seal.Means, dict[str, bool | str]]:
    """Return the strongest seal with which the GPU, if any, can still be opened, and its measures."""
    # A driver that fails under a measure must not make every kernel fail, so the measure is omitted and reported.
    means, measures = strongest, _test(strongest, uid)
    if (reason := measures.pop("gpu", None)) is not None:
        by_landlock = ("files", "tcp", "devices", "scopes")
        for weaker, left_out in (
            (replace(strongest, covers=None), ("mounts",)),
            (replace(strongest, filter=b""), ("seccomp",)),
            (replace(strongest, landlock=0), by_landlock),
            (replace(strongest, landlock=0, filter=b""), ("seccomp", *by_landlock)),
            (replace(strongest, landlock=0, filter=b"", covers=None), ("seccomp", "mounts", *by_landlock)),
        ):
            retest = _test(weaker, uid)
            if retest.pop("gpu", None) is None:
                means = weaker
                measures = retest | dict.fromkeys(left_out, f"the GPU cannot be opened with it: {reason}")
                break
    if measures["mounts"] is not True:
        means = replace(means, covers=None)
    return means, measures


def _test(means: seal.Means, uid: int | None) -> dict[str, bool | str]:
    """Test every measure in a sealed child. If the GPU cannot be opened, the key ``gpu`` has the reason."""
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
    while select.select([reader], [], [], _TEST_S)[0] and (more := os.read(reader, 65536)):
        data += more
    os.close(reader)
    for pid in (child, bystander):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    Path(scratch).rmdir()
    return json.loads(data) if data else dict.fromkeys(names, "the test did not end")


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
    results: dict[str, bool | str] = {"mounts": "not tried"}
    try:
        if means.covers is not None:
            _note(results, "mounts", partial(_attach, means.covers, uid, scratch))
        _note(results, "limits", seal.limit)
        if uid is not None:
            seal.become(uid)
        _note(results, "no_capabilities", linux.drop_capabilities)
        _note(results, "no_new_privs", lambda: linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1))
        _try_landlock(results, means, bystander, scratch)
        _try_seccomp(results, means)
        if means.covers is not None and results["mounts"] is True:
            results["mounts"] = _use(means.covers, scratch)
        if means.reach.gpu_nodes and (reason := _open_gpu()):
            results["gpu"] = reason
    except BaseException as error:  # noqa: BLE001 -- reported to the parent
        results = {name: f"{type(error).__name__}: {error}" for name in level.MEASURES} | results
    finally:
        os.write(writer, json.dumps(results).encode())
        os._exit(0)


def _note(results: dict[str, bool | str], name: str, call: Callable[[], object]) -> None:
    try:
        call()
        results[name] = True
    except OSError as error:
        results[name] = f"refused: {error.strerror}"


def _attach(covers: mounts.Covers, uid: int | None, scratch: str) -> None:
    owner = (os.geteuid(), os.getegid()) if uid is None else (uid, uid)
    covers.attach(covers.make(_TEST_BYTES, *owner), scratch)


def _use(covers: mounts.Covers, scratch: str) -> bool | str:
    """Return True if each directory is private and can contain an executable library. Otherwise return the reason."""
    try:
        for directory in (scratch, *covers.directories):
            held = os.statvfs(directory)
            if held.f_blocks * held.f_frsize != _TEST_BYTES:
                return f"applied, but {directory} is not private"
            with open(f"{directory}/library", "xb+") as library:  # noqa: PTH123
                library.truncate(mmap.PAGESIZE)
                mmap.mmap(library.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_EXEC).close()
    except OSError as error:
        return f"applied, but it cannot be used: {error.strerror}"
    return True


def _try_landlock(results: dict[str, bool | str], means: seal.Means, bystander: int, scratch: str) -> None:
    names = {"files": 1, "tcp": landlock.ABI_TCP, "devices": landlock.ABI_DEVICES, "scopes": landlock.ABI_SCOPES}
    if not means.landlock:
        version = landlock.abi()
        reason = f"Landlock's interface {version} forbids renames between directories" if version else _NO_LANDLOCK
        results |= dict.fromkeys(names, reason)
        return
    try:
        tcp = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        tcp = None
    seal.restrict_files(means, scratch)
    attempts: dict[str, Callable[[], object]] = {
        "files": lambda: os.close(os.open("/", os.O_RDONLY)),
        # Port 1 has no listener. If it had one, the connection would be closed without any data.
        "tcp": lambda: tcp.connect(("127.0.0.1", 1)) if tcp else None,
        "devices": lambda: termios.tcgetattr(os.open("/dev/null", os.O_RDWR)),
        "scopes": lambda: os.kill(bystander, 0),
    }
    for name, since in names.items():
        if means.landlock < since:
            results[name] = f"needs version {since} of Landlock's interface, and this kernel has {means.landlock}"
        else:
            results[name] = _is_refused(attempts[name])
    if tcp:
        tcp.close()


def _try_seccomp(results: dict[str, bool | str], means: seal.Means) -> None:
    if not means.filter:
        results["seccomp"] = f"unknown processor: {platform.machine()}"
        return
    _note(results, "seccomp", lambda: seccomp.enforce(means.filter))
    if results["seccomp"] is True:
        results["seccomp"] = _is_refused(socket.socket)


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
    """Print a self-check's report as JSON. Arguments: the candidates' uid or an empty string, and their GPU's UUID.

    The check runs in a forked child, because only a process with one thread can enter namespaces.
    """
    uid, visible = sys.argv[1:]
    child = os.fork()
    if child == 0:
        status = 1
        try:
            self_check = prepare(int(uid) if uid else None, visible)
            self_check.groups.close()
            sys.stdout.write(json.dumps(self_check.report()) + "\n")
            sys.stdout.flush()
            status = 0
        finally:
            os._exit(status)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


if __name__ == "__main__":
    main()
