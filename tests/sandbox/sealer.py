"""A substitute for a fork server: it forks sealed processes that run one function each, and reports the results.

``python -m tests.sandbox.sealer USER DIRECTORY UID SOCKET ...``, with four arguments for each fleet: USER is the uid of
the fleet. If that is root, UID is the candidates' uid. Requests and answers are lines of JSON on the socket.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

from tests.sandbox import attacks  # imported before the seal, because the seal hides it
from workers.judge.candidate import harness
from workers.judge.forkserver.files import Files
from workers.judge.host import linux
from workers.judge.sandbox import seal, self_check, view
from workers.judge.sandbox.cgroups import Lack


def _fork(
    do: str, arguments: list[Any], profile: seal.Profile, base: self_check.SelfCheck | None
) -> tuple[int, int, Any]:
    """Fork a process that runs a function, sealed if there is a self-check. Return its pid, its pipe, its group."""
    group = base.groups.group(profile.host_memory_bytes, profile.processes) if base else None
    files = Files(profile, base.means.covers if base else None)
    reader, writer = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(writer)
        if files.mount is not None:
            os.close(files.mount)
        return pid, reader, group
    answer: dict[str, Any] = {}
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if base:
            seal.apply(profile, base.means, group, parent, {writer}, files.mount)
        else:
            os.chdir(profile.scratch)
            os.environ.update(seal.private_directories(profile.scratch))
            tempfile.tempdir = None
        os.write(writer, b"\n")
        answer["value"] = attacks.ALL[do](*arguments)
    except OSError as error:
        answer["errno"] = errno.errorcode.get(error.errno or 0, str(error))
    except BaseException:  # noqa: BLE001 -- reported to the test
        answer["failed"] = traceback.format_exc()
    os.write(writer, json.dumps(answer).encode())
    os._exit(0)


def _serve(request: dict[str, Any], root: Path, base: self_check.SelfCheck, uid: int | None) -> dict[str, Any]:
    def profile() -> seal.Profile:
        bounds = request.get("bounds", {})
        return seal.Profile(
            role=seal.Role.CANDIDATE, uid=uid, scratch=str(root / uuid4().hex), file_bytes=1 << 30,
            output_bytes=1 << 20, processes=bounds.get("processes", 256), scratch_bytes=bounds.get("files", 1 << 33),
            host_memory_bytes=bounds.get("memory", 4 << 30),
        )  # fmt: skip

    arguments = [os.getpid() if a == "FORKSERVER" else a for a in request.get("arguments", [])]
    used = base if request.get("sealed", True) else None
    sibling = None
    if "SIBLING" in arguments:
        # A sibling process, like the reference of a candidate.
        sibling = _fork("wait", [], profile(), used)
        os.read(sibling[1], 1)
    arguments = [sibling[0] if sibling and a == "SIBLING" else a for a in arguments]
    pid, reader, group = _fork(request["do"], arguments, profile(), used)
    _, status = os.waitpid(pid, 0)
    # Remaining children hold the pipe too, so the read does not wait for its end.
    os.set_blocking(reader, False)
    data = os.read(reader, 65536)
    os.close(reader)
    answer = json.loads(data) if data.strip() else {}
    answer["signal"] = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if group is not None:
        answer["out_of_memory"] = group.out_of_memory() is Lack.OWN
        group.kill()
        group.remove()
    if sibling:
        os.close(sibling[1])
        os.kill(sibling[0], signal.SIGKILL)
        os.waitpid(sibling[0], 0)
        if sibling[2] is not None:
            sibling[2].remove()
    orphans = linux.children(os.getpid())
    answer["left"] = sum(not linux.is_zombie(orphan) for orphan in orphans)
    for orphan in orphans:
        with contextlib.suppress(ProcessLookupError):
            os.kill(orphan, signal.SIGKILL)
        os.waitpid(orphan, 0)
    return answer


def main() -> None:
    harness.preload()
    fleets = list(zip(*[iter(sys.argv[1:])] * 4, strict=True))
    for user, directory, candidates, descriptor in fleets:
        if os.fork() == 0:  # like the fork server: freshly forked, with one thread
            for other in {int(fleet[3]) for fleet in fleets} - {int(descriptor)}:
                os.close(other)
            _answer(int(user), Path(directory), int(candidates), socket.socket(fileno=int(descriptor)))
    for fleet in fleets:
        os.close(int(fleet[3]))
    for _ in fleets:
        os.wait()


def _answer(user: int, root: Path, candidates: int, link: socket.socket) -> NoReturn:
    """Answer the requests for one fleet."""
    stream = link.makefile("rw", buffering=1)
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    uid = candidates if os.geteuid() == 0 and user == 0 else None
    if user != os.geteuid():
        if view.unreadable():
            view.rebuild()
        os.chown(root, user, user)
        seal.become(user)
    base = self_check.prepare(uid, "")
    print(json.dumps(base.report() | {"groups": [str(p.directory) for p in base.groups._places]}), file=stream)
    for line in stream:
        print(json.dumps(_serve(json.loads(line), root, base, uid)), file=stream)
    base.groups.close()
    os._exit(0)


if __name__ == "__main__":
    main()
