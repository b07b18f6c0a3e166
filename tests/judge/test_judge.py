"""Evaluations in sequence, in real processes, on a CPU slot."""

from __future__ import annotations

import os
import re
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from kqueue.categories import Category
from kqueue.contract import (
    Comparison,
    Deadlines,
    Limits,
    Phase,
    Policies,
    Policy,
    Precision,
    Purpose,
    Request,
    Settings,
    Timing,
    Tolerance,
)
from tests.judge.linear import FLOODS, PROBLEM, QUICK, WAIT, WAITING, judge, right
from tests.judge.rig import Rig
from tests.judge.sources import kernel, problem
from tests.waiting import until
from workers.judge.api import Judges
from workers.judge.host import linux
from workers.judge.pipeline import steps

pytestmark = pytest.mark.slow("judges many kernels")


def test_an_honest_kernel_passes(rig: Rig) -> None:
    """Layers made in the reference's order have its weights. A kernel can read its user's name and end its children."""
    top = """import ctypes, getpass, subprocess
assert getpass.getuser()  # torch's compiler asks, although the candidate's uid is in no list of users
child = subprocess.Popen(["sleep", "5"])
child.terminate()
assert child.wait() == -15
def resident():
    return next(int(line.split()[1]) >> 10 for line in open("/proc/self/status") if line.startswith("VmRSS"))
before = resident()
piece = ctypes.create_string_buffer(24 << 20)
ctypes.memset(piece, 1, 24 << 20)
del piece
print("kept", resident() - before)
"""
    outcome = judge(rig, right(top=top))
    assert outcome.category is Category.PASSED, outcome.message
    [kept] = [int(line.split()[1]) for line in outcome.log.splitlines() if line.startswith("kept")]
    assert kept > 20


def test_a_precision_is_the_dtype_of_inputs_and_weights(rig: Rig) -> None:
    body = "assert x.dtype == self.layer.weight.dtype == torch.bfloat16, x.dtype"
    outcome = judge(rig, right(body), QUICK.model_copy(update={"precision": Precision.BF16}))
    assert outcome.category is Category.PASSED, outcome.message


def test_a_pass_that_means_little_says_so(rig: Rig) -> None:
    """A constant is right where the reference's output is one. The message, which all reports show, has that label."""
    outcome = judge(rig, kernel("x: x[:, 0] * 0 + 1"), problem=problem("x: x.softmax(-1).sum(-1)"))
    assert outcome.passed, outcome.message
    words = "; but output 0 of the reference is the same for all inputs, so a constant is right"
    assert outcome.summary()["message"].endswith(words)
    outcome = judge(rig, right(), QUICK.model_copy(update={"tolerance": Tolerance(atol=0.01, rtol=0.01)}))
    words = (
        "right on 2 input sets; but none of the input sets is a hidden variant: the settings have their own tolerance"
    )
    assert (outcome.passed, outcome.message) == (True, words)


TIMED = Settings(checks=1, timing=Timing(purpose=Purpose.PUBLISH, calls=10, warmup=1))


def test_a_passed_kernel_is_timed_against_the_baseline(rig: Rig) -> None:
    for outcome in (judge(rig, right(WAIT), TIMED, WAITING) for _ in range(2)):
        assert outcome.category is Category.PASSED
        assert outcome.runtime is not None
        assert outcome.runtime.count == 10
        assert outcome.runtime.q1_ms <= outcome.runtime.median_ms <= outcome.runtime.q3_ms
        assert outcome.runtime.overhead_ms > 0
        assert outcome.evidence.baseline_taken in ("in_turn", "without_kernel")
        assert outcome.speedup is not None
        assert outcome.speedup_interval is not None
        assert outcome.speedup_interval[0] < outcome.speedup < outcome.speedup_interval[1]


def test_times_are_taken_by_the_judge_s_clock(rig: Rig) -> None:
    """A kernel that sleeps for 20 ms takes 20 ms, even if it sets back every clock of its process."""
    top = "import time\ntime.perf_counter_ns = time.perf_counter = time.monotonic = lambda: 0\n"
    outcome = judge(rig, right("time.sleep(0.02)", top), TIMED)
    assert outcome.runtime is not None
    assert outcome.baseline is not None
    assert outcome.runtime.median_ms > max(18, outcome.baseline.median_ms)


def test_work_between_the_calls_is_added_to_their_time(rig: Rig) -> None:
    # Linux counts the CPU time of a thread when it sleeps, and otherwise with the scheduler's ticks.
    top = "import hashlib, threading, time\nDATA = bytes(1 << 19)\ndef work():\n"
    top += "    while True: hashlib.sha256(DATA), time.sleep(1e-5)\n"
    top += "threading.Thread(target=work, daemon=True).start()\n"
    runtime = judge(rig, right("pass", top), TIMED).runtime
    assert runtime is not None
    assert runtime.between_ms is not None
    assert runtime.median_ms > runtime.between_ms > 0


def test_each_call_has_its_own_values(rig: Rig) -> None:
    """Inputs change from call to call, so an earlier call's answer is wrong. Timed calls are checked as well."""
    kernel = right("if hasattr(self, 'old'): return self.old\n        self.old = self.layer(x)")
    assert judge(rig, kernel).category is Category.WRONG_VALUES
    body = "self.n = getattr(self, 'n', 0) + 1\n        if self.n > 12: return self.layer(x) + 1"
    settings = Settings(checks=1, timing=Timing(calls=20, warmup=1))
    assert judge(rig, right(body), settings).category is Category.NONDETERMINISTIC


def test_a_kernel_that_is_wrong_in_every_second_call_is_nondeterministic(rig: Rig) -> None:
    for odd in (0, 1):
        body = f"self.n = getattr(self, 'n', 0) + 1\n        if self.n % 2 == {odd}: return self.layer(x) + 1"
        assert judge(rig, right(body)).category is Category.NONDETERMINISTIC


def test_weights_can_be_sparse_or_drawn_by_the_first_call(rig: Rig) -> None:
    """Only gradients need weights that exist before the first call."""
    problem = PROBLEM.replace("Linear(size, size)", "LazyLinear(size)").replace(
        "return self.layer(x)", "return torch.sparse.mm(self.sparse, self.layer(x).T)"
    )
    problem = problem.replace(
        "    def f", "        self.register_buffer('sparse', torch.eye(size).to_sparse_csr())\n    def f"
    )
    kernel = problem.replace("Model", "ModelNew")
    assert judge(rig, kernel, problem=problem).category is Category.PASSED
    outcome = judge(rig, kernel, QUICK.model_copy(update={"backward": True}), problem)
    assert (outcome.category, "lazy module" in outcome.message) == (Category.INVALID_PROBLEM, True)


def test_a_lower_precision_can_be_rejected(rig: Rig) -> None:
    """Where the problem's tolerance lets a lower precision pass, a policy decides."""
    draw = "import numpy; return [torch.tensor(numpy.random.randn(*s)).float() for s in ((64, 256), (256, 64))]"
    product = problem("a, b: a @ b", draw) + 'OUTPUT_TOLERANCE = {"atol": 1.0, "rtol": 0.1}'
    half = kernel("a, b: (a.bfloat16() @ b.bfloat16()).float()")
    for policy, category in ((Policy.FLAG, Category.PASSED), (Policy.REJECT, Category.REJECTED_BY_POLICY)):
        outcome = judge(rig, half, QUICK.model_copy(update={"policies": Policies(downgrades=policy)}), product)
        assert outcome.category is category, outcome.message
        assert "precision_downgrade" in [finding.rule for finding in outcome.evidence.findings or ()]


def test_modules_of_torchscript_are_modules(rig: Rig) -> None:
    """A model can be TorchScript's or have such a layer. Its registered buffers are reset and compared."""
    problem = PROBLEM.replace("Linear(size, size)", "BatchNorm1d(size)")
    layer = right().replace("torch.nn.Linear(size, size)", "torch.jit.script(torch.nn.BatchNorm1d(size))")
    whole = right().replace("Linear(size, size)", "BatchNorm1d(size)").replace("nn.Module", "jit.ScriptModule")
    settings = QUICK.model_copy(update={"policies": Policies(buffers=Policy.REJECT)})
    for source in (layer, whole.replace("    def f", "    @torch.jit.script_method\n    def f")):
        outcome = judge(rig, source, settings, problem)
        assert outcome.passed, outcome.message


@pytest.mark.parametrize("then", [".to(torch.int8)", " / 8"])
def test_a_value_can_be_on_the_other_side_of_a_step(rig: Rig, then: str) -> None:
    """A quantization by the reciprocal passes, and its excused values are counted. Other wrong values are refused."""
    step = "x = torch.rand(4, 8); x[0, :2] = torch.tensor([0x1EEEB84 / 2**27, 0x12E2FCC / 2**22]); return [x]"
    quantized = problem(f"x: (x / (x.abs().amax() / 127)).round(){then}", step)
    for wrong, passes in (("", True), (" + (x > 0.5)", False)):
        answer = f"x: (x * (127 / x.abs().amax())).round(){then}"
        outcome = judge(rig, kernel(answer + wrong), QUICK, quantized)
        assert outcome.passed is passes, outcome.message
        assert outcome.evidence.comparison is not None
        assert outcome.evidence.comparison.jumps == passes


def test_the_candidate_s_log_is_kept_and_cut(rig: Rig) -> None:
    body = (
        r"print('first' + 'x' * 40000 + '\na\x1b[31mred\x00\x07\x9b2J\tb'); import sys; print('last', file=sys.stderr)"
    )
    outcome = judge(rig, right(body))
    assert outcome.category is Category.PASSED
    assert outcome.log.rstrip().endswith("last")
    assert "a\ufffd[31mred\ufffd\ufffd\ufffd2J\tb\n" in outcome.log
    assert "first" not in outcome.log
    assert len(outcome.log) <= 16384


SECRETS = """
import os, socket, sys
found = []
for name in os.environ:
    if name.startswith(("KQUEUE_", "CELERY", "PG", "REDIS")):
        found.append(name)
for pid in range(1, os.getpid()):
    try:
        environ = open(f"/proc/{pid}/environ", "rb").read()
    except OSError:
        continue
    if b"secret-of-the-fleet" in environ:
        found.append(f"environ of {pid}")
for module in ("sqlalchemy", "psycopg", "celery", "redis", "workers.judge.pipeline", "kqueue.config"):
    if module in sys.modules:
        found.append(module)
for fd in map(int, os.listdir("/proc/self/fd")):
    try:
        target = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        continue
    if fd > 2 and not target.startswith(("socket:", "/memfd:", "/proc")):
        found.append(f"{fd}: {target}")
assert not found, found
"""


def test_a_shortage_of_launch_resources_is_a_fact(rig: Rig) -> None:
    top = "from triton.runtime.errors import OutOfResources\n"
    outcome = judge(rig, right("raise OutOfResources(1049600, 232448, 'x\\0\\x1b[2J\\nCORRECT')", top))
    assert outcome.category is Category.LAUNCH_RESOURCES_EXCEEDED
    short = outcome.facts.shortage
    assert short is not None
    assert (short.required, short.limit, short.kernel) == (1049600, 232448, "")
    assert short.resource.isprintable()
    top = "from workers.judge.channel.gpu_memory import CudaCallError\nclass E(Exception):\n    error_code = 1\n"
    assert judge(rig, right("raise E", top)).category is Category.LAUNCH_RESOURCES_EXCEEDED
    assert judge(rig, right("raise CudaCallError('call', 1)", top)).category is Category.CUDA_ERROR


@pytest.mark.skipif(os.getuid() != 0, reason="a fleet that is not root cannot give candidates a uid of their own")
def test_a_candidate_of_a_root_fleet_is_nobody_and_finds_no_secret(rig: Rig) -> None:
    """It has its own uid, no group, no capability, no way to regain root's, and private directories."""
    top = """
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
assert os.getuid() >= 48000 and os.getgroups() == [], (os.getuid(), os.getgroups())
assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0, status["CapEff"]
assert status["NoNewPrivs"].strip() == "1"
assert os.getsid(0) == os.getpid() == os.getpgrp()
assert os.environ["HOME"].startswith(os.getcwd()) and os.listdir(os.environ["HOME"]) == []
for forbidden in (lambda: os.setuid(0), lambda: os.kill(os.getppid(), 0), lambda: os.listdir("/root/.ssh")):
    try:
        forbidden()
    except (PermissionError, FileNotFoundError):
        continue
    raise AssertionError("allowed")
"""
    outcome = judge(rig, right(top=SECRETS + top))
    assert outcome.category is Category.PASSED, outcome.message


def test_nothing_is_left_of_an_evaluation(rig: Rig) -> None:
    before = set(linux.children(rig.forkserver.pid))
    top = (
        "import os, subprocess\nos.makedirs('a/b'); open('a/b/c', 'w').close(); os.chmod('a/b', 0); os.chmod('a', 0)\n"
    )
    outcome = judge(rig, right("subprocess.Popen(['sleep', '300'], start_new_session=True)", top))
    assert outcome.category is Category.SANDBOX_VIOLATION
    assert outcome.facts.leftovers >= 1
    until(lambda: list(rig.slot.scratch.iterdir()) == [])
    until(lambda: set(linux.children(rig.forkserver.pid)) <= before)


@pytest.mark.parametrize(
    ("body", "top", "phase"),
    [
        ("pass", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)\n", Phase.LOAD),
        ("self.n = getattr(self, 'n', 0) + 1\n        while self.n > 12: pass", "", Phase.TIME),
    ],
    ids=["load", "time"],
)
def test_each_phase_has_its_own_deadline(rig: Rig, body: str, top: str, phase: Phase) -> None:
    short = {f"{phase}_s": 1}
    settings = Settings(checks=1, timing=Timing(calls=20), deadlines=Deadlines(**short))
    outcome = judge(rig, right(body, top), settings)
    assert (outcome.category, outcome.phase) == (Category.TIMEOUT, phase)


@pytest.mark.parametrize(
    ("statement", "where", "facts"),
    [
        ("os._exit(0)", "body", {"exit_status": 0}),
        ("os._exit(3)", "top", {"exit_status": 3}),
        ("os.abort()", "top", {"signal": "SIGABRT"}),
        ("import ctypes; ctypes.string_at(0)", "body", {"signal": "SIGSEGV"}),
    ],
)
def test_a_death_is_told_by_its_wait_status(rig: Rig, statement: str, facts: dict[str, Any], where: str) -> None:
    """The facts name the signal or the exit status. An exit with status 0 is a crash too."""
    kernel = right(statement, "import os\n") if where == "body" else right(top=f"import os\n{statement}\n")
    outcome = judge(rig, kernel)
    assert outcome.category is Category.CRASHED
    assert outcome.facts.model_dump().items() >= facts.items()


def test_output_and_files_are_bounded(rig: Rig) -> None:
    settings = QUICK.model_copy(update={"limits": Limits(output_bytes=1 << 16, scratch_bytes=64 << 20)})
    outcome = judge(rig, right("while True: print('x' * 1000)"), settings)
    assert outcome.category is Category.OUTPUT_LIMIT
    assert outcome.message.endswith(" was exceeded (setting limits.output_bytes)")
    outcome = judge(rig, right(FLOODS[1]), settings)
    assert (outcome.category, outcome.facts.reason) == (Category.OUTPUT_LIMIT, "scratch")


def test_files_count_as_memory_where_they_lie_in_it(rig: Rig) -> None:
    if rig.forkserver.isolation["mounts"] is not True:
        pytest.skip(f"mounts: {rig.forkserver.isolation['mounts']}")
    body = (
        "held = bytearray(b'x' * (192 << 20)); open('file', 'wb').write(bytes(192 << 20)); import time; time.sleep(60)"
    )
    outcome = judge(rig, right(body), QUICK.model_copy(update={"limits": Limits(host_memory_bytes=512 << 20)}))
    assert outcome.category is Category.HOST_OUT_OF_MEMORY
    assert outcome.facts.peak_bytes is not None
    assert outcome.facts.peak_bytes > 512 << 20


def test_a_right_kernel_of_large_tensors_needs_no_more_memory_with_each_call(rig: Rig) -> None:
    """A clamp of 24 MiB passes under the limit of 380 MiB: memory of earlier calls is reused or given back."""
    clamp = "x: x.clamp(-0.5, 0.5)"
    limits, timing = Limits(host_memory_bytes=380 << 20), Timing(calls=5, warmup=1)
    settings = Settings(checks=1, comparison=Comparison.KERNELBENCH, limits=limits, timing=timing)
    outcome = judge(rig, kernel(clamp), settings, problem(clamp, "return [torch.randn(6 << 20)]"))
    assert outcome.category is Category.PASSED, outcome.message


def test_memory_of_the_whole_tree_is_bounded(rig: Rig) -> None:
    top = "import subprocess, sys\n"
    grow = "import time; x = [b'y' * (64 << 20) for _ in range(12)]; time.sleep(600)"
    settings = QUICK.model_copy(update={"limits": Limits(host_memory_bytes=640 << 20)})
    outcome = judge(rig, right(f'subprocess.run([sys.executable, "-c", {grow!r}])', top), settings)
    assert outcome.category is Category.HOST_OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("problem", "category"),
    [
        (PROBLEM.replace("class Model(", "class Other("), Category.INVALID_PROBLEM),
        (PROBLEM.replace("return self.layer(x)", "return None"), Category.INVALID_PROBLEM),
        (PROBLEM.replace("return self.layer(x)", "return x / 0 * 0"), Category.INVALID_PROBLEM),
        (PROBLEM.replace("torch.randn(4, 8)", "object()"), Category.INVALID_PROBLEM),
        ("import nothing_like_this\n" + PROBLEM, Category.REFERENCE_ERROR),
    ],
)
def test_a_broken_problem_is_the_problem_s_fault(rig: Rig, problem: str, category: Category) -> None:
    assert judge(rig, right(), problem=problem).category is category


def test_a_judge_waits_no_longer_than_all_deadlines_together(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """If nothing else ends a candidate, SIGALRM ends the judge, and the next evaluation succeeds."""
    monkeypatch.setattr(steps, "_BACKSTOP_S", 3 - QUICK.deadlines.total_s)
    kernel = right("import time; time.sleep(600)")
    ended = rig.judge(Request(problem=PROBLEM, kernel=kernel, backend="torch", settings=QUICK))
    assert (ended.category, ended.phase) == (Category.JUDGE_ERROR, Phase.CHECK)
    assert ended.facts.signal == "SIGALRM"
    until(lambda: linux.children(rig.forkserver.pid) == [])
    monkeypatch.undo()
    assert judge(rig, right()).category is Category.PASSED


@pytest.mark.parametrize("victim", ["judge", "judge supervisor"])
def test_the_judge_s_death_takes_the_candidate_with_it(rig: Rig, victim: str) -> None:
    before = set(linux.children(os.getpid()))
    with ThreadPoolExecutor(1) as thread:
        outcome = thread.submit(judge, rig, right(top="import time; time.sleep(600)\n"))
        until(lambda: len(linux.children(rig.forkserver.pid)) == 2)
        [supervisor] = set(linux.children(os.getpid())) - before
        os.kill(linux.children(supervisor)[0] if victim == "judge" else supervisor, signal.SIGKILL)
        assert outcome.result(30).category is Category.WORKER_LOST
    until(lambda: linux.children(rig.forkserver.pid) == [])
    assert judge(rig, right()).category is Category.PASSED


@pytest.mark.skipif(os.getuid() != 0, reason="a candidate with the fleet's uid may enter all that the fleet may")
def test_a_seal_that_fails_is_the_fleet_s_fault(rig: Rig) -> None:
    """A candidate whose directory cannot be entered never ran, so the fleet is blamed."""
    request = Request(problem=PROBLEM, kernel=right(), backend="torch", settings=QUICK)
    # The directory is private, and outside every directory that a candidate can own.
    with tempfile.TemporaryDirectory(dir="/run") as closed:
        outcome = rig.judge_at(replace(rig.slot, scratch=Path(closed)), request)
    assert outcome.category is Category.JUDGE_ERROR
    assert "could not be sealed: PermissionError" in outcome.message
    # Remaining processes of that judge are ended by their uid, which the next candidate has too.
    following = judge(rig, right())
    assert following.category is Category.PASSED, following.message


def test_a_worker_without_a_compiler_blames_no_kernel(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    outcome = rig.judge(Request(problem=PROBLEM, kernel=right(), backend="cpp", settings=QUICK))
    assert outcome.category is Category.JUDGE_ERROR
    assert "C++ compiler" in outcome.message


FIND_SHARED = """
import fcntl, os
def shared():
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if "memfd:" in os.readlink(f"/proc/self/fd/{fd}"):
                yield fd
        except OSError:
            continue
"""


DEEP_TREE = """import os
        for _ in range(1500):
            os.mkdir("d")
            os.chdir("d")
        os._exit(1)"""
STOP_EVERYBODY = """import os, signal
        if os.fork() == 0:
            os.setsid()
            while True:
                try: os.kill(-1, signal.SIGSTOP)
                except OSError: pass"""


def test_work_on_the_gpu_that_hangs_ends_before_the_phase_does(rig: Rig) -> None:
    """The process states when it waits for the GPU, here the kernel, because a CPU's calls never wait."""
    body = """import sys, time
        frame = sys._getframe()
        while "command" not in frame.f_locals: frame = frame.f_back
        frame.f_locals["self"]._flags[128] = 1
        time.sleep(600)"""
    outcome = judge(rig, right(body), Settings(checks=10, deadlines=Deadlines(gpu_s=3)))
    assert (outcome.category, outcome.phase) == (Category.TIMEOUT, Phase.CHECK)
    assert outcome.message.startswith("the GPU's work for one call did not end within 3 s, 300 times")


@pytest.mark.parametrize(
    ("body", "top", "category"),
    [
        # The pages that judge and fork server read cannot be truncated.
        ("[os.ftruncate(fd, 0) for fd in shared()]", FIND_SHARED, Category.RUNTIME_ERROR),
        # Closing the channel is not a crash.
        ("import os, time; os.closerange(3, 4096); time.sleep(1000)", "", Category.SANDBOX_VIOLATION),
        # A directory tree deeper than Python's recursion limit.
        (DEEP_TREE, "", Category.CRASHED),
        # A daemon that stops each process that tries to kill it.
        (STOP_EVERYBODY, "", Category.TIMEOUT),
    ],
    ids=["truncate", "close-channel", "deep-tree", "stop-everybody"],
)
def test_an_attack_on_the_fleet_is_the_kernel_s_own_failure(rig: Rig, body: str, top: str, category: Category) -> None:
    """An attack on the fleet's processes ends only the kernel, is blamed on it, and is not retried."""
    deadlines = Deadlines(check_s=2 if category is Category.TIMEOUT else 30)
    settings = QUICK.model_copy(update={"deadlines": deadlines, "limits": Limits(host_memory_bytes=640 << 20)})
    outcome = judge(rig, right(body, top), settings)
    assert outcome.category is category, outcome.message
    assert judge(rig, right()).category is Category.PASSED
    if rig.slot.uid is not None:
        until(lambda: linux.living_of_uid(rig.slot.uid or 0) == [])


def test_a_kernel_cannot_make_the_reference_late(rig: Rig) -> None:
    top = "import os\nfor _ in range(40):\n    if os.fork() == 0:\n        while True: pass\n"
    settings = QUICK.model_copy(update={"deadlines": Deadlines(reference_s=3, load_s=2, check_s=2)})
    assert judge(rig, right(top=top), settings).category in (Category.SANDBOX_VIOLATION, Category.TIMEOUT)


def test_a_reference_that_fails_only_when_timed_is_the_problem_s_fault(rig: Rig) -> None:
    counted = "self.n = getattr(self, 'n', 0) + 1\n        assert self.n < 9\n        return self.layer(x)"
    problem = PROBLEM.replace("return self.layer(x)", counted)
    settings = Settings(checks=1, timing=Timing(calls=7, warmup=1))
    assert judge(rig, right(), settings, problem).category is Category.REFERENCE_ERROR


def test_a_kernel_learns_neither_its_evaluation_nor_the_fleets_logging(rig: Rig) -> None:
    identity = uuid4()
    top = """import logging, sys
logging.getLogger("library").debug("WORDY")
print("level", logging.getLogger().level, logging.getLogger().handlers)
frame, seen = sys._getframe(), []
while frame:
    for value in list(frame.f_locals.values()):
        seen += [repr(value), repr(getattr(value, "__dict__", "")), repr(getattr(value, "about", ""))]
        seen += [repr(one.about) for one in getattr(getattr(value, "_watch", None), "running", {}).values()]
    frame = frame.f_back
word = "'att" + "empt': "
print("seen", len(seen), *[one for one in seen if word in one])
"""
    judges = Judges(rig.forkserver)
    judges.status_page.open(identity, 7)
    request = Request(problem=PROBLEM, kernel=right(top=top), backend="torch", settings=QUICK)
    outcome = judges.judge(request, rig.slot, rig.backend)
    judges.leave()
    assert outcome.category is Category.PASSED, outcome.message
    assert "level 30 []" in outcome.log
    assert "WORDY" not in outcome.log
    assert str(identity) not in outcome.log
    assert re.search(r"^seen \d+$", outcome.log, re.MULTILINE), outcome.log
