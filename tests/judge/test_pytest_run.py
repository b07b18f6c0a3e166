"""Pytest runs of a repository: the fork server reports how the process of the tests ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kqueue.categories import Blame, Category
from kqueue.contract import MAX_SOURCE_BYTES, TESTS_LINE, Outcome, Request, parse_request
from kqueue.errors import InvalidRequest
from kqueue.trees import packed_tests
from tests.judge.rig import Rig
from tests.judge.sources import ROOT, suite_of
from workers.judge.candidate.archive import NotAnArchive, unpack
from workers.judge.forkserver.process import SealedProcess
from workers.judge.pipeline import pytest_run

pytestmark = pytest.mark.slow("runs repositories' tests")


def words(outcome: Outcome) -> list[dict[str, Any]]:
    assert outcome.evidence.tests is not None
    return [json.loads(line) for line in outcome.evidence.tests.words.splitlines()]


@pytest.mark.parametrize(
    ("body", "category"),
    [
        ("assert __file__ == 0", Category.TESTS_FAILED),
        ("os._exit(0)", Category.CRASHED),
        ("time.sleep(1000)", Category.TIMEOUT),
        ("[say(b'x' * 60_000) for _ in range(1000)]; time.sleep(10)", Category.OUTPUT_LIMIT),
        ("os.closerange(3, 1024); time.sleep(2); os._exit(0)", Category.CRASHED),
        ("pytest.exit('enough', 0)", Category.CRASHED),
    ],
    ids=["failed", "exit", "timeout", "output", "silent", "half"],
)
def test_the_fork_server_tells_how_tests_end(rig: Rig, tmp_path: Path, body: str, category: Category) -> None:
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
    request = suite_of(tmp_path, module, names=["test_before", "test_it"], deadlines={"check_s": 3.0}, limits=limits)
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
    request = suite_of(tmp_path, "def test_one(): pass\ndef test_two(): pass\n", names=["test_one", "test_two"])
    order = json.loads(request.kernel.removeprefix(TESTS_LINE))
    for share in ({"renew_s": 0.001}, {"renew_bytes": 1}):
        outcome = rig.judge(request.model_copy(update={"kernel": TESTS_LINE + json.dumps(order | share)}))
        assert outcome.category is Category.PASSED
        said = [word["at"] for word in words(outcome)]
        assert said.count("finish") == said.count("renew") == 1


def test_a_process_that_reports_for_ever_is_ended(rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
    outcome = rig.judge(suite_of(tmp_path, module, names=["test_it"]))
    assert outcome.category is Category.TIMEOUT
    assert "2 s together" in outcome.message


def test_nobody_takes_much_more_of_a_gpu_than_is_booked(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begin = pytest_run.PytestRun.__init__
    holds = iter([5 << 30, 6 << 30])

    def begun(own: pytest_run.PytestRun, process: SealedProcess, request: Request, *_: object) -> None:
        begin(own, process, request, 1 << 30, lambda: next(holds, 9 << 30))

    monkeypatch.setattr(pytest_run.PytestRun, "__init__", begun)
    outcome = rig.judge(suite_of(tmp_path, "import time\ndef test_it(): time.sleep(1000)\n", names=["test_it"]))
    assert outcome.category is Category.GPU_OUT_OF_MEMORY
    assert (outcome.facts.held_bytes, outcome.facts.allowed_bytes) == (4 << 30, 1 << 30)
    assert outcome.blame is Blame.CANDIDATE


def test_a_problem_without_files_is_the_problem_s_fault(rig: Rig, tmp_path: Path) -> None:
    request = suite_of(tmp_path, "def test_it(): pass\n", names=["test_it"])
    kernel = Request(problem=request.problem, kernel="import torch\nclass ModelNew: ...", backend="torch")
    wrong = [request.model_copy(update={"problem": TESTS_LINE + text}) for text in ("no base64", "aGVsbG8=")]
    for each in (*wrong, request.model_copy(update={"problem": "class Model: ..."}), kernel):
        outcome = rig.judge(each)
        assert outcome.category is Category.INVALID_PROBLEM
        assert each not in wrong or "cannot be unpacked" in outcome.message


def test_a_request_is_for_a_kernel_or_for_tests(tmp_path: Path) -> None:
    request = suite_of(tmp_path, "def test_it(): pass\n", names=["test_it"])
    large = request.model_copy(update={"problem": TESTS_LINE + "x" * (2 * MAX_SOURCE_BYTES)})
    assert parse_request(dict(large)) == large
    named = {"problem": request.problem_name}
    assert parse_request(dict(request) | named).problem_hash == request.problem_hash
    for wrong in (
        {"backend": "torch"},
        {"kernel": "class ModelNew: ..."},
        named | {"backend": "torch"},
        {"settings": {"examine": {"profile": True}, "timing": {"purpose": "check"}}},
        {"settings": {"examine": {"sanitize": ["racecheck"]}, "timing": {"purpose": "check"}}},
    ):
        with pytest.raises(InvalidRequest, match="tests"):
            parse_request(dict(request) | wrong)


def test_an_archive_holds_what_it_was_made_of(tmp_path: Path) -> None:
    root, copy = tmp_path / "root", tmp_path / "copy"
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "a.txt").write_bytes(b"\x00\xff")
    (root / "run").touch(0o755)
    text = packed_tests(root)
    (root / "run").touch()
    assert packed_tests(root) == text
    unpack(text, copy)
    assert (copy / "sub" / "a.txt").read_bytes() == b"\x00\xff"
    assert (copy / "run").stat().st_mode & 0o100
    with pytest.raises(NotAnArchive):
        unpack(TESTS_LINE + text[len(TESTS_LINE) : len(TESTS_LINE) + 40], tmp_path / "cut")
