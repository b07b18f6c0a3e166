"""Judging without a fleet, from Python: the process that judges, its life and its ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kqueue import Config, InvalidRequest, JudgeUnavailable, LocalJudge
from kqueue.config import load
from kqueue.judging import guess_backend, request_of
from tests.waiting import waits
from workers.judge.host import holders, linux

pytestmark = pytest.mark.slow("starts judges of its own")

EXAMPLES = Path(__file__).parents[2] / "examples" / "kernels"
PROBLEM = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x)
def get_inputs():
    return [torch.randn(64, 64)]
def get_init_inputs():
    return []
"""
KERNEL = """
import json, os, signal, time, torch
class ModelNew(torch.nn.Module):
    def forward(self, x):
        {}
"""
RIGHT = KERNEL.format("return torch.clamp(x, min=0)")
WRONG = KERNEL.format("return torch.relu(x) + 1")
ENDLESS = KERNEL.format("time.sleep(600)")
UNTIMED = {"checks": 1, "timing": {"enabled": False}}


@pytest.fixture(scope="module")
def config() -> Iterator[Config]:
    """Settings with a scratch directory of their own."""
    with tempfile.TemporaryDirectory(prefix="kqueue-test-") as name:
        Path(name).chmod(0o711)
        yield load(scratch=Path(name, "scratch"))


@pytest.fixture(scope="module")
def local(config: Config) -> Iterator[LocalJudge]:
    """A judge on the CPU that has started."""
    with LocalJudge("cpu", config=config) as judge:
        yield judge


def service() -> int:
    """Return the process that judges for this one."""
    [pid] = [p for p in linux.children(os.getpid()) if b"workers.judge" in Path(f"/proc/{p}/cmdline").read_bytes()]
    return pid


def below(pid: int) -> set[int]:
    """Return all processes below one."""
    children = set(linux.children(pid))
    return children.union(*map(below, children))


def until(look: Callable[[], object], seconds: float = 60) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def runs(name: str) -> bool:
    """True if a process with this name is below this one, and is not a candidate that waits for its kernel."""
    for pid in below(os.getpid()):
        try:
            if Path(f"/proc/{pid}/comm").read_text().strip() == name and not waits(pid):
                return True
        except OSError:
            continue
    return False


def test_a_right_kernel_has_a_time(local: LocalJudge) -> None:
    """An outcome tells whether the kernel is right, how long it takes, and beside what; the judge tells on what."""
    outcome = local(problem=PROBLEM, kernel=RIGHT, settings={"checks": 2, "timing": {"calls": 5, "precision": 0}})
    assert outcome.passed, outcome.message
    assert outcome.runtime_ms is not None
    assert outcome.speedup is not None
    assert local.machine.device == "cpu"
    assert local.machine.environment.torch
    assert local.doubts == []


@pytest.mark.parametrize(
    ("problem", "kernel", "category"),
    [
        (PROBLEM, WRONG, "wrong_values"),
        (PROBLEM, KERNEL.format("os.kill(os.getpid(), signal.SIGSEGV)"), "crashed"),
        (PROBLEM, KERNEL.format("os._exit(0)"), "crashed"),
        (PROBLEM, KERNEL.format("raise ValueError(1)"), "runtime_error"),
        (PROBLEM, "class ModelNew(", "syntax_error"),
        (PROBLEM.replace("torch.relu(x)", "x.nothing"), RIGHT, "reference_error"),
        ("x = 1", RIGHT, "invalid_problem"),
    ],
)
def test_failures_are_outcomes(local: LocalJudge, problem: str, kernel: str, category: str) -> None:
    """What a kernel or a problem does wrong is an outcome, and the judge goes on."""
    outcome = local(problem=problem, kernel=kernel, backend="torch", settings=UNTIMED)
    assert outcome.category == category, outcome.message


def test_a_candidate_holds_no_pipe_of_the_judge(local: LocalJudge) -> None:
    """A kernel finds neither the judge's pipes nor the settings' secrets among what it inherits."""
    told = "\n        ".join(
        [
            "found = []",
            "for fd in range(256):",
            "    try: found.append(os.readlink(f'/proc/self/fd/{fd}'))",
            "    except OSError: pass",
            "raise ValueError(json.dumps(found))",
        ]
    )
    outcome = local(problem=PROBLEM, kernel=KERNEL.format(told), settings=UNTIMED)
    assert outcome.category == "runtime_error"
    held = set(re.findall(r"pipe:\[\d+\]", outcome.message + outcome.log))
    ours = {str(link.readlink()) for link in Path(f"/proc/{service()}/fd").iterdir()}
    assert ours
    assert held.isdisjoint(ours)


def test_many_are_judged_in_order(local: LocalJudge) -> None:
    """`map` yields an outcome for each request, in their order."""
    requests = [request_of(problem=PROBLEM, kernel=kernel, settings=UNTIMED) for kernel in (WRONG, RIGHT, "x = (")]
    assert [str(outcome.category) for outcome in local.map(requests)] == ["wrong_values", "passed", "syntax_error"]


def test_what_cannot_be_judged_here_is_refused(local: LocalJudge, config: Config) -> None:
    """A kernel that needs a GPU, a stored problem, a missing field and an unknown device are clear errors."""
    with pytest.raises(JudgeUnavailable, match="a cuda kernel needs a GPU"):
        local(problem=PROBLEM, kernel=RIGHT, backend="cuda")
    with pytest.raises(InvalidRequest, match="only a fleet has stored problems"):
        local(problem=f"sha256:{'0' * 64}", kernel=RIGHT)
    with pytest.raises(InvalidRequest, match="kernel: is required"):
        local(problem=PROBLEM)
    with pytest.raises(InvalidRequest, match="not both"):
        local(request_of(problem=PROBLEM, kernel=RIGHT), kernel=WRONG)
    with pytest.raises(JudgeUnavailable, match="device=977: no GPU 977"):
        LocalJudge("977", config=config).__enter__()
    assert local(problem=PROBLEM, kernel=RIGHT, settings=UNTIMED).passed


@pytest.mark.parametrize("name", ["kq-forkserver", "kq-seat"])
def test_a_killed_server_is_replaced(local: LocalJudge, name: str) -> None:
    """The service outlives its fork server and its seat: the next kernel is judged by others."""
    for server in linux.children(service()):
        if Path(f"/proc/{server}/comm").read_text().strip() == name:
            os.kill(server, signal.SIGKILL)
    assert local(problem=PROBLEM, kernel=RIGHT, settings=UNTIMED).passed


def test_a_killed_judge_is_replaced(local: LocalJudge, config: Config) -> None:
    """A judge that is killed leaves no process. The call fails, the next one succeeds and removes the files."""
    failures: list[Exception] = []

    def call() -> None:
        try:
            local(problem=PROBLEM, kernel=ENDLESS, settings=UNTIMED)
        except JudgeUnavailable as error:
            failures.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    until(lambda: runs("kq-candidate"))
    first, others = service(), below(service())
    os.kill(first, signal.SIGKILL)
    caller.join(60)
    assert len(failures) == 1
    assert "ended unexpectedly" in str(failures[0])
    until(lambda: all(linux.is_zombie(pid) for pid in others))
    assert local(problem=PROBLEM, kernel=RIGHT, settings=UNTIMED).passed
    assert len([*config.scratch.glob("judge-*")]) == 1
    assert len([*config.scratch.glob("judge-*/*")]) == 1


def test_the_thread_that_starts_a_judge_may_end(config: Config) -> None:
    """A judge serves all threads of its process, however short the life of the one that started it."""
    judge = LocalJudge("cpu", config=config)
    starter = threading.Thread(target=judge.__enter__)
    starter.start()
    starter.join()
    try:
        assert judge(problem=PROBLEM, kernel=RIGHT, settings=UNTIMED).passed
    finally:
        judge.close()


def test_nothing_is_left_of_a_closed_judge(config: Config) -> None:
    """`close` ends every process of the judge and removes its files; closing twice is allowed."""
    before = set(config.scratch.glob("judge-*"))
    with LocalJudge("cpu", config=config) as judge:
        assert judge(problem=PROBLEM, kernel=RIGHT, settings=UNTIMED).passed
        started = below(os.getpid())
        made = set(config.scratch.glob("judge-*")) - before
        assert made
    judge.close()
    assert not any(path.exists() for path in made)
    until(lambda: len(below(os.getpid()) & started) < len(started))


def test_a_wait_for_anothers_device_is_explained(local: LocalJudge, config: Config) -> None:
    """Two judges of one user take turns, and the outcome of the one that waited names the other."""
    slow = KERNEL.format("time.sleep(600)")
    other = threading.Thread(
        target=local, kwargs={"problem": PROBLEM, "kernel": slow, "settings": UNTIMED | {"deadlines": {"check_s": 15}}}
    )
    pid = service()
    locks = config.scratch / "locks"
    with LocalJudge("cpu", config=config) as judge:
        other.start()
        until(lambda: (holder := holders.stranger(locks / "cpu.lock")) and f"process {pid} " in holder.words)
        outcome = judge(problem=PROBLEM, kernel=RIGHT, settings=UNTIMED)
        other.join()
    assert outcome.passed, outcome.message
    assert outcome.evidence.waited_for is not None
    [whom] = outcome.evidence.waited_for
    assert f"process {pid} " in whom
    assert f"started by process {os.getpid()} " in whom


_DEAF = """
import os, signal, sys, threading, time
from workers.judge.__main__ import _Ending
reader, _ = os.pipe()
ending = _Ending(os.getppid())
def told():
    time.sleep(0.2)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
with ending:
    threading.Thread(target=told, daemon=True).start()
    os.read(reader, 1)
"""


def test_a_signal_that_wakes_no_system_call_is_heard() -> None:
    """A signal that comes before a call blocks, and so does not interrupt it, ends the process all the same."""
    # One that another thread takes interrupts nothing either.
    done = subprocess.run([sys.executable, "-c", _DEAF], timeout=60, check=False)
    assert done.returncode == 128 + signal.SIGTERM


def test_a_judge_that_does_not_end_is_killed(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing a judge whose process does not answer raises nothing, and leaves nothing."""
    monkeypatch.setattr("kqueue.judging._STOP_S", 0.5)
    others = {*linux.children(os.getpid())}
    with LocalJudge("cpu", config=config):
        [pid] = {*linux.children(os.getpid())} - others
        parts = {pid, *below(pid)}
        os.kill(pid, signal.SIGSTOP)
    until(lambda: all(linux.is_zombie(part) for part in parts))


def test_it_needs_no_service(tmp_path: Path) -> None:
    """`kqueue.judge` works where nothing of a fleet can be imported, and loads no torch into its caller."""
    with tempfile.TemporaryDirectory(prefix="kqueue-test-") as name:
        root = Path(name)
        root.chmod(0o755)
        for package in ("billiard", "celery", "kombu", "psycopg", "redis", "sqlalchemy"):
            (root / f"{package}.py").write_text("raise ImportError('not installed here')\n")
        code = (
            "import sys, kqueue\n"
            f"outcome = kqueue.judge(problem={PROBLEM!r}, kernel={RIGHT!r}, device='cpu', settings={UNTIMED!r})\n"
            "print(outcome.category, [name for name in ('torch', 'triton', 'numpy') if name in sys.modules])\n"
        )
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],
            env={**os.environ, "PYTHONPATH": str(root), "KQUEUE_SCRATCH": str(root / "scratch")},
            capture_output=True,
            text=True,
            timeout=170,
            check=False,
        )
    assert done.stdout == "passed []\n", done.stderr


def test_a_machine_without_torch_says_what_to_install(tmp_path: Path) -> None:
    """Without the extra `worker` the error names it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'torch' else find(name, *more)\n"
    )
    code = f"import kqueue\nkqueue.judge(problem={PROBLEM!r}, kernel={RIGHT!r})"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "JudgeUnavailable" in done.stderr
    assert "pip install 'kqueue[worker]'" in done.stderr


@pytest.mark.parametrize(
    "kernel", sorted(EXAMPLES.glob("good/*/*.py")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_the_backend_shows_in_the_source(kernel: Path) -> None:
    """Each right kernel of the gallery shows the backend that it is written for."""
    assert guess_backend(kernel.read_text()) == kernel.parent.name


def test_a_source_that_shows_two_backends_is_not_guessed() -> None:
    """Then the caller is asked."""
    with pytest.raises(InvalidRequest, match="triton or cupy"):
        guess_backend("import triton\nimport cupy\n")
