"""A local judge without a fleet: its process, its lifetime and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kqueue import Config, InvalidRequest, JudgeUnavailable, LocalJudge
from kqueue.config import load
from kqueue.judging import guess_backend, request_of
from tests.judge import extension
from tests.judge.linear import WAIT
from tests.judge.sources import problem
from tests.waiting import below, proc, until
from workers.judge.host import holders, linux
from workers.judge.host.status_page import StatusPage
from workers.judge.pipeline.steps import Steps
from workers.judge.slot_config import SlotConfig

pytestmark = pytest.mark.slow("starts judges of its own")

EXAMPLES = Path(__file__).parents[2] / "examples" / "kernels"
PROBLEM = problem("x: torch.relu(x)", "return [torch.randn(64, 64)]")
KERNEL = """
import json, os, signal, time, torch
class ModelNew(torch.nn.Module):
    def forward(self, x):
        {}
"""
RIGHT = KERNEL.format("return torch.clamp(x, min=0)")
WRONG = KERNEL.format("return torch.relu(x) + 1")
ENDLESS = KERNEL.format("open('here', 'w').close(); time.sleep(600)")
UNTIMED = {"checks": 1, "timing": {"purpose": "check"}}


@pytest.fixture(scope="module")
def config() -> Iterator[Config]:
    with tempfile.TemporaryDirectory(prefix="kqueue-test-") as name:
        Path(name).chmod(0o711)
        yield load(scratch=Path(name, "scratch"), preload="no_such_module, zipapp")


@pytest.fixture(scope="module")
def foreign() -> Iterator[Path]:
    """A folder in which the packages of a fleet cannot be imported."""
    with tempfile.TemporaryDirectory(prefix="kqueue-test-") as name:
        Path(name).chmod(0o755)
        for package in ("billiard", "celery", "kombu", "psycopg", "redis", "sqlalchemy", "workers"):
            Path(name, f"{package}.py").write_text("raise ImportError('not installed here')\n")
        yield Path(name)


@pytest.fixture(scope="module")
def local(config: Config, foreign: Path) -> Iterator[LocalJudge]:
    """A judge on the CPU, started by another thread. A foreign `workers` and no package of a fleet can be imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(foreign))
        judge = LocalJudge("cpu", config=config)
        starter = threading.Thread(target=judge.__enter__)
        starter.start()
        starter.join()
        with judge:
            yield judge


def service() -> int:
    """Return the process that judges for this one: the youngest, because other modules can hold a judge too."""
    every = [p for p in linux.children(os.getpid()) if "workers.judge" in proc(p, "cmdline")]
    # The 22nd field is the time of its start. Numbers of processes begin again at the maximum.
    return max(every, key=lambda p: int(proc(p, "stat").rpartition(")")[2].split()[19]))


def test_a_right_kernel_has_a_time(local: LocalJudge) -> None:
    waiting = problem(f"x: ({WAIT}, torch.relu(x))[1]", "return [torch.randn(64, 64)]")
    kernel = KERNEL.format(f"{WAIT}; return torch.clamp(x, min=0)")
    outcome = local(problem=waiting, kernel=kernel, settings={"checks": 2, "timing": {"calls": 5}})
    assert outcome.passed, outcome.message
    assert outcome.runtime_ms is not None
    assert outcome.speedup is not None
    assert local.machine.device == "cpu"
    assert local.machine.environment.torch
    assert local.doubts == []


def test_failures_are_outcomes_in_the_order_of_requests(local: LocalJudge) -> None:
    cases = [
        (PROBLEM, WRONG, "wrong_values"),
        (PROBLEM, KERNEL.format("os.kill(os.getpid(), signal.SIGSEGV)"), "crashed"),
        (PROBLEM, "class ModelNew(", "syntax_error"),
        (PROBLEM.replace("torch.relu(x)", "x.nothing"), RIGHT, "reference_error"),
        (PROBLEM, RIGHT, "passed"),
    ]
    requests = [
        request_of(problem=problem, kernel=kernel, backend="torch", settings=UNTIMED) for problem, kernel, _ in cases
    ]
    assert [str(outcome.category) for outcome in local.map(requests)] == [category for *_, category in cases]


def test_sealed_processes_inherit_preloaded_modules(local: LocalJudge) -> None:
    """A module of the setting is imported before the fork. Another one that does not exist has no effect."""
    kernel = KERNEL.format("import sys; sys.modules['zipapp']; return torch.clamp(x, min=0)")
    outcome = local(problem=PROBLEM, kernel=kernel, settings=UNTIMED)
    assert outcome.passed, outcome.message


def test_builds_are_kept_beside_the_scratch_directories(local: LocalJudge, config: Config) -> None:
    for origin in ("builder", "store"):
        outcome = local(problem=extension.PROBLEM, kernel=extension.kernel(), backend="cpp", settings=extension.QUICK)
        assert outcome.passed, outcome.message
        assert outcome.evidence.build.where == origin
    assert (config.scratch / "builds").is_dir()


def test_what_cannot_be_judged_here_is_refused(local: LocalJudge, config: Config) -> None:
    with pytest.raises(JudgeUnavailable, match="a cuda kernel needs a GPU"):
        local(problem=PROBLEM, kernel=RIGHT, backend="cuda")
    with pytest.raises(InvalidRequest, match="only a fleet has stored problems"):
        local(problem=f"sha256:{'0' * 64}", kernel=RIGHT)
    with pytest.raises(InvalidRequest, match="kernel: is required"):
        local(problem=PROBLEM)
    with pytest.raises(InvalidRequest, match="problem and kernel are swapped"):
        local(problem=RIGHT, kernel=PROBLEM)
    with pytest.raises(InvalidRequest, match="not both"):
        local(request_of(problem=PROBLEM, kernel=RIGHT), kernel=WRONG)
    with pytest.raises(JudgeUnavailable, match="device=977: no GPU 977"):
        LocalJudge("977", config=config).__enter__()
    assert local(problem=PROBLEM, kernel=RIGHT, settings=UNTIMED).passed


def test_a_killed_server_is_replaced(local: LocalJudge) -> None:
    """The service survives the end of its fork server and its judge supervisor, and new ones judge the next kernel."""
    for server in linux.children(service()):
        if proc(server, "comm").strip() in ("kq-forkserver", "kq-judge-super"):
            os.kill(server, signal.SIGKILL)
    assert local(problem=PROBLEM, kernel=RIGHT, settings=UNTIMED).passed


def test_nothing_is_left_of_a_closed_judge(local: LocalJudge, config: Config) -> None:
    """`close` ends every process of the judge and removes its files. A later call starts another judge."""
    started, made = {service(), *below(service())}, set(config.scratch.glob("judge-*"))
    assert made
    local.close()
    assert not any(path.exists() for path in made)
    until(lambda: started.isdisjoint(below(os.getpid())))
    assert local(problem=PROBLEM, kernel=RIGHT, settings=UNTIMED).passed


def test_a_killed_judge_is_replaced(local: LocalJudge, config: Config) -> None:
    """A killed judge leaves no process. The current call fails, and the next one succeeds and removes the files."""
    first, lock = service(), config.scratch / "locks" / "cpu.lock"
    slot = SlotConfig(name="p", number=0, device="cpu", siblings=1, scratch=config.scratch / "p", lock=lock, uid=None)
    steps = Steps(StatusPage(), slot, 600.0)
    pytests = signal.getsignal(signal.SIGALRM)  # restored below, because a step replaces the handler
    with ThreadPoolExecutor(2) as pool:
        call = pool.submit(local, problem=PROBLEM, kernel=ENDLESS, settings=UNTIMED)
        until(lambda: any(Path(f"/proc/{child}/cwd/here").exists() for child in below(first)))
        assert (holder := holders.stranger(lock))
        assert f"process {first} " in holder.words
        others = set(below(first))
        killed = pool.submit(lambda: until(lambda: steps.waited_for) and os.kill(first, signal.SIGKILL))
        with steps.alone("measure"):
            signal.signal(signal.SIGALRM, pytests)
        killed.result()
        with pytest.raises(JudgeUnavailable, match="ended unexpectedly"):
            call.result(60)
    [whom] = steps.waited_for
    assert f"process {first} " in whom
    assert f"started by process {os.getpid()} " in whom
    until(lambda: all(linux.is_zombie(pid) for pid in others))
    assert local(problem=PROBLEM, kernel=RIGHT, settings=UNTIMED).passed
    assert len([*config.scratch.glob("judge-*")]) == 1
    assert len([*config.scratch.glob("judge-*/*")]) == 1


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
    """A signal that arrives before a blocking call, and so does not interrupt it, still ends the process."""
    # A signal that another thread receives interrupts no call either.
    assert subprocess.run([sys.executable, "-c", _DEAF], timeout=60, check=False).returncode == 128 + signal.SIGTERM


def test_a_judge_that_does_not_end_is_killed(local: LocalJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing a judge whose process does not answer raises nothing."""
    monkeypatch.setattr("kqueue.judging._STOP_S", 0.5)
    parts = {service(), *below(service())}
    os.kill(service(), signal.SIGSTOP)
    local.close()
    until(lambda: all(linux.is_zombie(part) for part in parts))


def test_it_needs_no_service(foreign: Path) -> None:
    """`kqueue.judge` can be imported without a fleet's packages, and imports no torch."""
    code = "import sys, kqueue; kqueue.judge, kqueue.LocalJudge; print({'torch', 'triton', 'numpy'} & set(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": str(foreign)}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


def test_the_backend_shows_in_the_source() -> None:
    """Each correct kernel of the gallery shows its backend, and a source with two backends is refused."""
    for kernel in EXAMPLES.glob("good/*/*.py"):
        assert guess_backend(kernel.read_text()) == kernel.parent.name, kernel
    words = '"""As in x.cu and cpp_sources."""\nimport tritonic\nimport torch  # triton\n'
    assert guess_backend(words) == guess_backend("def f(:") == "torch"
    assert guess_backend(words + "load(name='k', sources=['k.cpp', 'k.cu'])") == "cuda"
    with pytest.raises(InvalidRequest, match="cupy or triton"):
        guess_backend("import triton\nimport cupy\n")
