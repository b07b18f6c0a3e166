"""Tests of a repository in the judge's hands: what becomes of their process is the fork server's word."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from kqueue.categories import Blame, Category
from kqueue.contract import MAX_SOURCE_BYTES, TESTS_LINE, Outcome, Request, parse_request
from kqueue.errors import InvalidRequest
from tests.judge.rig import Rig
from workers.judge.candidate.archive import NotAnArchive, pack, unpack
from workers.judge.forkserver.process import SealedProcess
from workers.judge.pipeline import pytest_run, tools

pytestmark = pytest.mark.slow("runs repositories' tests")

ROOT = "/home/sender/project"


def asked(folder: Path, module: str, *, names: list[str], **settings: Any) -> Request:
    (folder / "test_a.py").write_text(module)
    order = {
        "root": ROOT, "started_in": ".", "args": ["-p", "kqueue"], "program": "pytest", "searched": [], "options": {},
        "environment": {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, "tests": [f"test_a.py::{name}" for name in names],
        "files": [f"{ROOT}/test_a.py"],
    }  # fmt: skip
    return parse_request(
        {
            "problem": pack(folder, [PurePosixPath("test_a.py")]),
            "kernel": TESTS_LINE + json.dumps(order),
            "backend": "pytest",
            "reuse": False,
            "settings": {"timing": {"enabled": False}} | settings,
        }
    )


def words(outcome: Outcome) -> list[dict[str, Any]]:
    assert outcome.evidence.tests is not None
    return [json.loads(line) for line in outcome.evidence.tests.words.splitlines()]


def test_a_seal_holds_for_tests_as_for_kernels(rig: Rig, tmp_path: Path) -> None:
    """They reach no network, no secret and no file of the host's users; of the slot's settings they see nothing."""
    module = """
import os, signal, socket, subprocess, tempfile, pytest

def test_sealed():
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", 1))
    with pytest.raises(OSError):
        os.listdir("/")
    with pytest.raises(OSError):
        os.kill(os.getppid(), 0)
    assert not [name for name in os.environ if name.startswith("KQUEUE_") or "secret" in os.environ[name]]

def test_usual(tmp_path):
    (tmp_path / "file").write_text("text")
    child = subprocess.Popen(["sleep", "1000"])
    child.terminate()
    assert child.wait() == -signal.SIGTERM

def test_leaves(): subprocess.Popen(["sleep", "1000"], start_new_session=True)
"""
    outcome = rig.judge(asked(tmp_path, module, names=["test_sealed", "test_usual", "test_leaves"]))
    assert outcome.category is Category.PASSED, (outcome.message, words(outcome))
    assert [word["nodeid"] for word in words(outcome) if word["at"] == "finish"] == [
        "test_a.py::test_sealed",
        "test_a.py::test_usual",
        "test_a.py::test_leaves",
    ]


@pytest.mark.parametrize(
    ("body", "category"),
    [
        ("assert __file__ == 0", Category.TESTS_FAILED),
        ("os._exit(0)", Category.CRASHED),
        ("time.sleep(1000)", Category.TIMEOUT),
        pytest.param(
            "held = [bytearray(b'x') * (1 << 28) for _ in range(8)]; time.sleep(10)",
            Category.HOST_OUT_OF_MEMORY,
            marks=pytest.mark.nightly,
        ),
        ("[say(b'x' * 60_000) for _ in range(1000)]; time.sleep(10)", Category.OUTPUT_LIMIT),
        ("os.closerange(3, 1024); time.sleep(2); os._exit(0)", Category.CRASHED),
    ],
    ids=["failed", "exit", "timeout", "memory", "output", "silent"],
)
def test_the_fork_server_tells_how_tests_end(rig: Rig, tmp_path: Path, body: str, category: Category) -> None:
    """Its category has its facts, as with a kernel, and earlier reports are kept.

    A process that closes all descriptors has not passed, and the judge does not spin meanwhile. Paths are the sender's.
    """
    module = f"""
import os, pytest, time

@pytest.fixture
def say(request):
    plugins = request.config.pluginmanager.get_plugins()
    [said] = [plugin._said for plugin in plugins if type(plugin).__name__ == "_Child"]
    return lambda line: os.write(said, line)

def test_before(): pass
def test_it(say): {body}
"""
    limits = {"host_memory_bytes": 1 << 30}
    request = asked(tmp_path, module, names=["test_before", "test_it"], deadlines={"check_s": 3.0}, limits=limits)
    outcome = rig.judge(request)
    assert outcome.category is category, (outcome.message, outcome.log)
    assert outcome.blame is Blame.CANDIDATE
    assert "test_a.py::test_before" in [word["nodeid"] for word in words(outcome) if word["at"] == "finish"]
    assert (outcome.evidence.cpu_s or {})["judge"] < 1.5
    if category is Category.TESTS_FAILED:
        reports = [word["data"] for word in words(outcome) if word["at"] == "report"]
        [failed] = [report for report in reports if report["outcome"] == "failed"]
        assert f"{ROOT}/test_a.py" in json.dumps(failed["longrepr"])
        assert outcome.facts.failed == 1


def test_a_process_that_has_had_its_share_leaves_the_rest(rig: Rig, tmp_path: Path) -> None:
    """It says so and ends well: others wait for the device. Its sender has another process run the other tests."""
    request = asked(tmp_path, "def test_one(): pass\ndef test_two(): pass\n", names=["test_one", "test_two"])
    order = json.loads(request.kernel.removeprefix(TESTS_LINE))
    for share in ({"renew_s": 0.001}, {"renew_bytes": 1}):
        outcome = rig.judge(request.model_copy(update={"kernel": TESTS_LINE + json.dumps(order | share)}))
        assert outcome.category is Category.PASSED
        said = [word["at"] for word in words(outcome)]
        assert said.count("finish") == said.count("renew") == 1


def test_a_process_that_reports_for_ever_is_ended(rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that says again and again that a test begins has no more than its share of the time."""
    monkeypatch.setattr(pytest_run, "_MOST_S", 2.0)
    module = """
import os, time

def test_it(request):
    child = request.config.pluginmanager
    [own] = [plugin for plugin in child.get_plugins() if type(plugin).__name__ == "_Child"]
    while True:
        own.say("start", nodeid="test_a.py::test_it", location=None)
        time.sleep(0.5)
"""
    outcome = rig.judge(asked(tmp_path, module, names=["test_it"]))
    assert outcome.category is Category.TIMEOUT
    assert "2 s together" in outcome.message


def test_nobody_takes_much_more_of_a_gpu_than_is_booked(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What this place holds grows beyond the share: the tests are ended, and not for a fault of the fleet."""
    begin = pytest_run.PytestRun.__init__
    holds = iter([5 << 30, 6 << 30])

    def begun(own: pytest_run.PytestRun, process: SealedProcess, request: Request, *_: object) -> None:
        begin(own, process, request, 1 << 30, lambda: next(holds, 9 << 30))

    monkeypatch.setattr(pytest_run.PytestRun, "__init__", begun)
    outcome = rig.judge(asked(tmp_path, "import time\ndef test_it(): time.sleep(1000)\n", names=["test_it"]))
    assert outcome.category is Category.GPU_OUT_OF_MEMORY
    assert (outcome.facts.held_bytes, outcome.facts.allowed_bytes) == (4 << 30, 1 << 30)
    assert outcome.blame is Blame.CANDIDATE


def test_a_problem_without_files_is_the_problem_s_fault(rig: Rig, tmp_path: Path) -> None:
    request = asked(tmp_path, "def test_it(): pass\n", names=["test_it"])
    kernel = Request(problem=request.problem, kernel="import torch\nclass ModelNew: ...", backend="torch")
    wrong = [request.model_copy(update={"problem": TESTS_LINE + text}) for text in ("no base64", "aGVsbG8=")]
    for each in (*wrong, request.model_copy(update={"problem": "class Model: ..."}), kernel):
        outcome = rig.judge(each)
        assert outcome.category is Category.INVALID_PROBLEM
        assert each not in wrong or "cannot be unpacked" in outcome.message


def test_a_host_without_pytest_is_no_fault_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the fleet's failure, and says what to install."""
    monkeypatch.setitem(sys.modules, "pytest", None)
    monkeypatch.delitem(sys.modules, "pytest")
    monkeypatch.setattr(tools.importlib.util, "find_spec", lambda name: None)
    assert tools.missing(tools.Backend.PYTEST) == ["the package pytest is not installed"]


TOOL = """#!/bin/sh
while [ "$1" != --log-file ]; do shift; done
echo "========= Invalid __global__ write of size 4 bytes" > "$2"
shift 2
exec "$@"
"""


def test_tests_are_watched_by_compute_sanitizer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, judge_environment: None
) -> None:
    """A stand-in for it writes what is told; its process ends as the tests' does. Without the tool the fleet failed."""
    request = asked(tmp_path, "def test_it(): assert 0\n", names=["test_it"], examine={"sanitize": ["memcheck"]})
    with tempfile.TemporaryDirectory(prefix="kqueue-tool-") as name:
        Path(name).chmod(0o755)
        tool = Path(name) / "compute-sanitizer"
        tool.write_text(TOOL)
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{name}{os.pathsep}{os.environ['PATH']}")
        with Rig() as own:
            outcome = own.judge(request)
            tool.unlink()
            without = own.judge(request)
    lacking = [
        measure
        for measure in ("own_uid", "seccomp", "files", "mounts")
        if own.forkserver.isolation[measure] is not True
    ]
    if lacking:
        assert outcome.category is Category.JUDGE_ERROR
        return
    assert outcome.category is Category.TESTS_FAILED, outcome.message
    assert outcome.evidence.tests is not None
    assert outcome.evidence.tests.findings == "========= Invalid __global__ write of size 4 bytes"
    assert without.category is Category.JUDGE_ERROR
    assert "compute-sanitizer is not installed" in without.message


def test_a_request_is_for_a_kernel_or_for_tests(tmp_path: Path) -> None:
    """Their sources are told apart by the first line, also where the problem is named by its hash alone."""
    request = asked(tmp_path, "def test_it(): pass\n", names=["test_it"])
    large = request.model_copy(update={"problem": TESTS_LINE + "x" * (2 * MAX_SOURCE_BYTES)})
    assert parse_request(dict(large)) == large
    named = {"problem": request.problem_name}
    assert parse_request(dict(request) | named).problem_hash == request.problem_hash
    for wrong in (
        {"backend": "torch"},
        {"kernel": "class ModelNew: ..."},
        named | {"backend": "torch"},
        {"settings": {"examine": {"profile": True}, "timing": {"enabled": False}}},
        {"settings": {"examine": {"sanitize": ["racecheck"]}, "timing": {"enabled": False}}},
    ):
        with pytest.raises(InvalidRequest, match="tests"):
            parse_request(dict(request) | wrong)


def test_an_archive_holds_what_it_was_made_of(tmp_path: Path) -> None:
    """The same text for the same files; links within it stay, others are what they lead to; nothing lies outside."""
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (tmp_path / "outside").write_text("outside")
    (root / "sub" / "a.txt").write_bytes(b"\x00\xff")
    (root / "run").write_text("#!/bin/sh\n")
    (root / "run").chmod(0o755)
    (root / "inside").symlink_to("sub/a.txt")
    (root / "out").symlink_to("../outside")
    (root / "broken").symlink_to("nowhere/at/all")
    (root / "absolute").symlink_to(root / "sub" / "a.txt")
    names = [PurePosixPath(name) for name in ("run", "sub/a.txt", "inside", "out", "absolute")]
    text = pack(root, names)
    (root / "run").touch()
    assert pack(root, reversed(names)) == text
    unpack(text, tmp_path / "copy")
    copy = tmp_path / "copy"
    assert (copy / "sub" / "a.txt").read_bytes() == b"\x00\xff"
    assert (copy / "run").stat().st_mode & 0o100
    assert str((copy / "inside").readlink()) == "sub/a.txt"
    assert (copy / "out").read_text() == "outside"
    assert not (copy / "absolute").is_symlink()
    with pytest.raises(NotAnArchive):
        unpack(TESTS_LINE + text[len(TESTS_LINE) : len(TESTS_LINE) + 40], tmp_path / "cut")
