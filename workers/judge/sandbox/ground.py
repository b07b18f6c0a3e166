"""What the host lets a slot's seals be made of: tried for real, once, when its fork server starts."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import platform
import select
import signal
import socket
import sys
import termios
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

from workers.judge.host import linux
from workers.judge.sandbox import cgroups, landlock, level, namespaces, reach, seal, seccomp, view

#: How long a trial may take, in seconds; it opens the driver, which takes a moment where nobody else has.
_TRIAL_S: Final = 60.0
_NO_LANDLOCK: Final = "this kernel has no Landlock, or it may not be used here"


@dataclass(frozen=True, slots=True)
class Ground:
    """What seals are made of, and what that comes to.

    Attributes:
        means: for :func:`workers.judge.sandbox.seal.apply`.
        groups: for each candidate's control group.
        measures: every measure of :data:`workers.judge.sandbox.level.MEASURES`: True, or why not.
        view: ``host``, or ``rebuilt`` where candidates see a private view of the file system.
    """

    means: seal.Means
    groups: cgroups.Groups
    measures: dict[str, bool | str]
    view: str

    def report(self) -> dict[str, Any]:
        """What verdicts say of the isolation."""
        return {**self.measures, "level": str(level.reached(self.measures)), "view": self.view}


def prepare(uid: int | None, visible: str | None) -> Ground:
    """Find out, and change the calling process where candidates are to inherit it: view and namespaces.

    Args:
        uid: the candidates' own; None where they keep the fleet's.
        visible: the value of ``CUDA_VISIBLE_DEVICES``, by which candidates find their GPU.
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
            measures["own_uid"] = f"interpreter or packages lie where other users may not go, and {error.strerror}"
    else:
        measures["own_uid"] = "the fleet is not root"
    measures |= namespaces.enter()
    found, pinned = reach.find(visible)
    wanted = seal.Means(landlock.abi(), _filter(), found)
    if wanted.landlock < landlock.ABI_FILES:
        wanted = replace(wanted, landlock=0)
    means, tried = _most_that_works(wanted, uid if measures["own_uid"] is True else None)
    measures |= tried
    measures["gpu_nodes"] = pinned if measures["files"] is True else f"needs files: {measures['files']}"
    groups = cgroups.Groups()
    measures |= groups.measures
    return Ground(means, groups, {name: measures[name] for name in level.MEASURES}, shown)


def _filter() -> bytes:
    try:
        return seccomp.program(platform.machine())
    except KeyError:
        return b""


def _most_that_works(wanted: seal.Means, uid: int | None) -> tuple[seal.Means, dict[str, bool | str]]:
    """The most of a seal with which a GPU can still be opened, where there is one.

    A driver that does not live with a measure must not make every kernel fail: it is left out, and said.
    """
    means, tried = wanted, _trial(wanted, uid)
    if (refused := tried.pop("gpu", None)) is not None:
        for less, left_out in (
            (replace(wanted, filter=b""), ("seccomp",)),
            (replace(wanted, landlock=0), ("files", "tcp", "devices", "scopes")),
            (replace(wanted, landlock=0, filter=b""), ("seccomp", "files", "tcp", "devices", "scopes")),
        ):
            again = _trial(less, uid)
            if again.pop("gpu", None) is None:
                means = less
                tried = again | dict.fromkeys(left_out, f"the GPU cannot be opened with it: {refused}")
                break
    return means, tried


def _trial(means: seal.Means, uid: int | None) -> dict[str, bool | str]:
    """Seal a child and have it try what it must not be able to do, and what it must.

    Returns:
        for each measure True or why not; under ``gpu`` why the GPU could not be opened, if so.
    """
    names = ("no_new_privs", "no_capabilities", "limits", "seccomp", "files", "tcp", "devices", "scopes")
    bystander = _fork_bystander(uid)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _try_in_child(means, uid, bystander, writer)
    os.close(writer)
    data = b""
    while select.select([reader], [], [], _TRIAL_S)[0] and (more := os.read(reader, 65536)):
        data += more
    os.close(reader)
    for pid in (child, bystander):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return json.loads(data) if data else dict.fromkeys(names, "the trial of it did not end")


def _fork_bystander(uid: int | None) -> int:
    """A process of the same user that is not sealed, which a sealed one must not be able to signal."""
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


def _try_in_child(means: seal.Means, uid: int | None, bystander: int, writer: int) -> NoReturn:
    found: dict[str, bool | str] = {}
    try:
        _note(found, "limits", seal.limit)
        if uid is not None:
            seal.become(uid)
        _note(found, "no_capabilities", linux.drop_capabilities)
        _note(found, "no_new_privs", lambda: linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1))
        _try_landlock(found, means, bystander)
        _try_seccomp(found, means)
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


def _try_landlock(found: dict[str, bool | str], means: seal.Means, bystander: int) -> None:
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
    seal.restrict_files(means, "")
    attempts: dict[str, Callable[[], object]] = {
        "files": lambda: os.close(os.open("/", os.O_RDONLY)),
        # Nothing listens on port 1, and where something did it would not be spoken to.
        "tcp": lambda: tcp.connect(("127.0.0.1", 1)) if tcp else None,
        "devices": lambda: termios.tcgetattr(os.open("/dev/null", os.O_RDWR)),
        "scopes": lambda: os.kill(bystander, 0),
    }
    for name, since in names.items():
        if means.landlock < since:
            found[name] = f"Landlock's interface is {means.landlock} here, {since} is needed"
        else:
            found[name] = _is_refused(attempts[name])
    if tcp:
        tcp.close()


def _try_seccomp(found: dict[str, bool | str], means: seal.Means) -> None:
    if not means.filter:
        found["seccomp"] = f"system calls of {platform.machine()} are not known"
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
        return "applied, and without effect"
    return True if code in (errno.EACCES, errno.EPERM) else f"applied, and not what refused: {os.strerror(code or 0)}"


def _open_gpu() -> str:
    """Whether CUDA starts, in this process; empty if it does."""
    try:
        code = int(ctypes.CDLL("libcuda.so.1").cuInit(0))
    except OSError:
        return ""  # there is no driver, which others will say
    return f"cuInit answers {code}" if code else ""


def main() -> None:
    """Print what a fork server would report, as JSON. Arguments: the candidates' uid, or nothing; their GPU's UUID.

    In a child, as namespaces are entered by processes of one thread.
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
