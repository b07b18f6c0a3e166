"""Access of each role to data and to the other roles, tested between real processes: the tables in docs/isolation.md.

The sealed processes are forked and sealed by a real fork server. The judge, the worker's parent and the supervisor are
replaced by processes of the fleet's user with the same access: a secret in memory and environment, files, listeners.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import pytest
import torch

from kqueue import trees
from kqueue.contract import Phase
from tests.judge.rig import Rig
from tests.memory import held
from tests.waiting import until
from workers.judge.channel import orders, reports
from workers.judge.channel.flags import memory
from workers.judge.channel.orders import Examine, Job, Opening, Order
from workers.judge.ending import EvaluationEnded
from workers.judge.forkserver.process import SealedProcess
from workers.judge.host import linux, uids
from workers.judge.sandbox import shelf
from workers.judge.sandbox.seal import Profile, Role

pytestmark = pytest.mark.slow("searches the memory of every role")

DOCUMENT = Path(__file__).parents[2] / "docs" / "isolation.md"
#: Names of the processes in the tables. The first four run the fleet's own code.
TRUSTED = ("judge", "fork server", "worker parent", "supervisor")
SEALED = {
    role.value: role for role in (Role.REFERENCE, Role.CANDIDATE, Role.BUILDER, Role.EXAMINED, Role.TESTS, Role.WATCHED)
}
#: Roles that become pytest. Tools are installed on the host, so the second role is tested without one.
_PYTEST = ("tests", "watched")
#: Program that replaces a tool: it skips the tool's options, and runs the rest of its arguments.
_TOOL = f"""#!/bin/sh
while [ "$1" != "{sys.executable}" ]; do shift; done
exec "$@"
"""
#: Deadline in seconds of each process, which must live until all memory was searched, even on a busy machine.
LONG_S = 600.0
#: Kinds of access of one process to another, as named in the tables.
WAYS = ("signal", "read memory", "read files", "write files", "connect")
#: Patterns of the ends of the marks that processes are given below. They do not match their own text.
MARKS = {"credentials": rb"ROLE[S]", "problem's source": rb"PROBLE[M]", "kernel's source": rb"KERNE[L]"}

_STAND_IN = """
import os, socket, sys
place = sys.argv[1]
secret = os.environ["KQUEUE_DATABASE_URL"]
listeners = [socket.socket(socket.AF_UNIX) for _ in range(2)]
for listener, address in zip(listeners, (place + "/socket", "\\0" + place)):
    listener.bind(address)
    listener.listen()
os.chmod(place + "/socket", 0o777)
print("ready", flush=True)
sys.stdin.read()
"""
#: Program of a sealed process that makes a file and a listener as accessible as it can.
_OPEN = """
import os, socket
os.umask(0)
open("own", "w").write("own")
os.chmod("own", 0o666)
os.chmod(".", 0o777)
listener = socket.socket(socket.AF_UNIX)
listener.bind("\\0" + os.getcwd())
listener.listen()
"""
_ATTACK = """
import ctypes, json, os, platform, socket, struct

def connect(address):
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(2)
        link.connect(address)

def read_memory(pid):
    try:
        os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY))
        return
    except OSError:
        pass
    buffer = ctypes.create_string_buffer(8)
    ours = struct.pack("QQ", ctypes.addressof(buffer), 8)
    libc = ctypes.CDLL(None)
    number = 270 if platform.machine() == "aarch64" else 310
    if libc.syscall(ctypes.c_long(number), ctypes.c_long(pid), ours, ctypes.c_long(1), ours, ctypes.c_long(1), 0) < 0:
        raise PermissionError

def first(*attempts):
    for attempt in attempts:
        try:
            attempt()
        except OSError:
            continue
        return True
    return False

reached = {}
for name, (pid, place) in TARGETS.items():
    reached[name] = [
        first(lambda: os.kill(pid, 0)),
        first(lambda: read_memory(pid), lambda: open(f"/proc/{pid}/environ", "rb").read(1)),
        first(lambda: open(f"{place}/own").read(), lambda: os.listdir(place), lambda: os.listdir(f"/proc/{pid}/fd")),
        first(lambda: open(f"{place}/own", "a").close(), lambda: open(f"{place}/new", "w").close()),
        first(lambda: connect("\\0" + place), lambda: connect(place + "/socket")),
    ]
raise RuntimeError("REACHED " + json.dumps(reached))
"""
_MODEL = "import torch\nclass {entry}(torch.nn.Module): pass\ndef get_inputs(): return []\n"


@dataclass
class Cast:
    """One process of each role, with its pid and directory. Attackers have the uid of a second slot."""

    rig: Rig
    other_uid: int
    targets: dict[str, tuple[int, str]] = field(default_factory=dict[str, tuple[int, str]])
    words: list[socket.socket] = field(default_factory=list[socket.socket])

    def fork(self, role: str, slot_uid: int) -> tuple[SealedProcess, int, str]:
        place = self.rig.slot
        # The fork server chooses which of its uids a reference has.
        offset = {"builder": uids.BUILDER_OFFSET, "examined": uids.COMPILED_OFFSET}.get(role, 0)
        profile = Profile(
            role=SEALED[role], uid=slot_uid + offset, scratch=str(place.scratch / uuid4().hex), processes=64,
            file_bytes=1 << 20, host_memory_bytes=2 << 30, output_bytes=1 << 20, scratch_bytes=1 << 20,
            built=str(self.shelf) if role == "examined" else None,
        )  # fmt: skip
        before = set(linux.children(self.rig.forkserver.pid))
        process = SealedProcess(self.rig.forkserver, profile, LONG_S)
        process.enter(Phase.PREPARE, LONG_S)
        if role != "examined" and role not in _PYTEST:
            process.order(Order.OPEN, payload=Opening("cpu"))

        def new() -> list[int]:
            # There can also be a new process that removes a directory.
            children = set(linux.children(self.rig.forkserver.pid)) - before
            return [pid for pid in children if directory_of(pid) == profile.scratch]

        [pid] = until(new, what="a sealed process")
        return process, pid, profile.scratch

    def load(self, process: SealedProcess, role: str, source: str) -> None:
        if role in _PYTEST:
            self._test(process, textwrap.dedent(source))
            return
        mark = {"reference": "MARK-OF-THE-PROBLE" + "M"}.get(role, "MARK-OF-THE-KERNE" + "L")
        entry = "Model" if role == "reference" else "ModelNew"
        whole = f"# {mark}\n{textwrap.dedent(source)}\n{_MODEL.format(entry=entry)}"
        if role == "examined":
            self._examine(process, whole)
            return
        process.enter(Phase.LOAD, LONG_S)
        process.order(Order.BUILD if role == "builder" else Order.LOAD, payload=_job(whole, role))

    @property
    def shelf(self) -> Path:
        """The folder of the tool, which an examined kernel can read."""
        return self.rig.slot.scratch / "shelf"

    def _test(self, process: SealedProcess, source: str) -> None:
        """Run pytest in a process, and wait until a test runs or the process has ended."""
        folder = Path(tempfile.mkdtemp(prefix="kqueue-roles-"))
        try:
            mark = f"MARK = 'MARK-OF-THE-PROBLE' + 'M'\nimport os\nos.chdir('..')\n{source}"
            (folder / "conftest.py").write_text(mark)
            (folder / "test_a.py").write_text("import time\ndef test_a(): time.sleep(1_000)\n")
            archive = trees.packed_tests(folder)
        finally:
            shutil.rmtree(folder)
        order = {
            "root": "/home/sender/project", "started_in": ".", "args": ["-p", "kqueue"], "searched": [], "options": {},
            "environment": {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, "program": "MARK-OF-THE-KERNE" + "L",
            "tests": ["test_a.py::test_a"], "files": ["/home/sender/project/test_a.py"],
        }  # fmt: skip
        ours, theirs = socket.socketpair()
        self.words.append(ours)
        process.enter(Phase.LOAD, LONG_S)
        with theirs:
            process.become(Order.TEST, orders.Testing(archive, json.dumps(order), ""), theirs.fileno())
        said = b""
        while b'"start"' not in said and not process.ends(0.5, ours):
            said += ours.recv(1 << 16)

    def _examine(self, process: SealedProcess, kernel: str) -> None:
        """Run a kernel under a tool, together with a problem."""
        shelf.make(self.shelf)
        (self.shelf / "tool").write_text(_TOOL)
        (self.shelf / "tool").chmod(0o755)
        problem = f"# MARK-OF-THE-PROBLE{'M'}\n{_MODEL.format(entry='Model')}"
        process.enter(Phase.EXAMINE, LONG_S)
        page = memory("report", reports.SIZE)
        asked = Examine("memcheck", str(self.shelf / "tool"), "cpu", _job(kernel, "examined"), problem, LONG_S)
        process.order(Order.EXAMINE, payload=asked)
        process.order(Order.FINISH)
        process.order(Order.REPORT, fds=(page,))
        os.close(page)


def directory_of(pid: int) -> str | None:
    try:
        return str(Path(f"/proc/{pid}/cwd").readlink())
    except OSError:
        return None


def _job(source: str, role: str) -> Job:
    return Job(source=source, entry="Model" if role == "reference" else "ModelNew", dtype=torch.float32, seed=1)


@pytest.fixture(scope="module")
def cast() -> Iterator[Cast]:
    """Processes of all roles, each as accessible as it can make itself."""
    if os.geteuid() != 0:
        pytest.skip("the stand-ins are root's")
    secret = "SECRET-OF-THE-ROLE" + "S"
    root = Path(tempfile.mkdtemp(prefix="kqueue-roles-"))
    root.chmod(0o755)
    stand_ins: list[subprocess.Popen[str]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KQUEUE_DATABASE_URL", secret)
        patch.setenv("OMP_NUM_THREADS", "1")
        with Rig() as rig:
            assert rig.slot.uid is not None
            other = uids.hold(rig.slot.uid + 1)
            made = Cast(rig, other.uid)
            # A test has the uid of a candidate, and a slot has only one candidate at a time.
            slots = {role: uids.hold(other.uid + 1) for role in _PYTEST}
            sealed: list[SealedProcess] = []
            try:
                for role in ("judge", "worker parent", "supervisor"):
                    place = root / role.replace(" ", "-")
                    place.mkdir(mode=0o755)
                    (place / "own").write_text(secret)
                    (place / "own").chmod(0o644)
                    command = [sys.executable, "-c", _STAND_IN, str(place)]
                    stand_in = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                    stand_ins.append(stand_in)
                    assert stand_in.stdout is not None
                    assert stand_in.stdout.readline() == "ready\n"
                    made.targets[role] = (stand_in.pid, str(place))
                made.targets["fork server"] = (rig.forkserver.pid, str(rig.slot.scratch))
                for role in SEALED:
                    process, pid, scratch = made.fork(role, slots[role].uid if role in slots else rig.slot.uid)
                    sealed.append(process)
                    made.load(process, role, _OPEN)
                    made.targets[role] = (pid, scratch)
                yield made
            finally:
                for process in sealed:
                    process.stop()
                for words in made.words:
                    words.close()
                for slot in (other, *slots.values()):
                    slot.release()
                for stand_in in stand_ins:
                    stand_in.communicate()
                shutil.rmtree(root)


@pytest.fixture(scope="module")
def reached(cast: Cast) -> dict[str, dict[str, list[bool]]]:
    """Access of a process of each sealed role to one process of every role, including its own."""
    found: dict[str, dict[str, list[bool]]] = {}
    for role in SEALED:
        process, _, _ = cast.fork(role, cast.other_uid)
        attack = f"TARGETS = {cast.targets!r}\n{_ATTACK}"
        if role == "examined" or role in _PYTEST:
            cast.load(process, role, attack)
            said = process.stop().log
        else:
            with pytest.raises(EvaluationEnded) as ended:
                cast.load(process, role, attack)
            process.stop()
            assert ended.value.reply is not None
            said = ended.value.reply.message
        assert "REACHED " in said, said
        # A traceback quotes the source before the message.
        found[role] = json.loads(said.rpartition("REACHED ")[2].partition("\n")[0])
    return found


def table(title: str) -> dict[str, dict[str, str]]:
    """Return the cells of a table of the document by row and column. The title is the first cell of its header."""
    text = DOCUMENT.read_text(encoding="utf-8")
    match = re.search(rf"^\| {re.escape(title)} \|(.+)\|\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert match, f"docs/isolation.md has no table {title!r}"
    columns = [cell.strip() for cell in match[1].split("|")]
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in match[2].splitlines()]
    return {row[0]: dict(zip(columns, row[1:], strict=True)) for row in rows}


@pytest.mark.parametrize("role", SEALED)
def test_a_sealed_role_reaches_no_other_process(
    reached: dict[str, dict[str, list[bool]]], cast: Cast, role: str
) -> None:
    if cast.rig.forkserver.isolation["level"] != "full":
        pytest.skip("this host lacks a measure")
    worked = {target: list(itertools.compress(WAYS, reached[role][target])) for target in (*TRUSTED, *SEALED)}
    assert not any(worked.values()), worked


def test_the_attacks_work_where_nothing_is_sealed(cast: Cast) -> None:
    """An unsealed process of the fleet's user reaches the substitutes in each way, so only the seal refuses it."""
    targets = {name: cast.targets[name] for name in ("judge", "worker parent", "supervisor")}
    done = subprocess.run(
        [sys.executable, "-c", f"TARGETS = {targets!r}\n{_ATTACK}"], capture_output=True, text=True, check=False
    )
    assert json.loads(done.stderr.partition("REACHED ")[2]) == {name: [True] * len(WAYS) for name in targets}


@pytest.mark.parametrize("role", ["judge", "fork server", *SEALED])
def test_a_role_holds_what_the_table_says(cast: Cast, role: str) -> None:
    """The memory of each process, with its environment, is searched. tests/security/test_memory.py covers a judge."""
    cells = {what: cell for what, cell in table("process")[role].items() if what in MARKS}
    if role == "judge":
        assert cells == {what: "no" if what == "credentials" else "yes" for what in MARKS}
        return
    pid = cast.targets[role][0]
    assert {*cells.values()} <= {"yes", "no"}
    assert all(_held(pid, mark) for what, mark in MARKS.items() if cells[what] == "yes")
    absent = [mark for what, mark in MARKS.items() if cells[what] == "no"]
    assert not absent or not _held(pid, *absent)
    # The credentials of a worker parent are found, which proves that the search works.
    assert _held(cast.targets["worker parent"][0], MARKS["credentials"])


def _held(pid: int, *marks: bytes) -> bool:
    """Search a process for any of the marks, whose common beginning makes the search fast."""
    return held(pid, rb"-OF-THE-(?:%s)" % b"|".join(marks))
