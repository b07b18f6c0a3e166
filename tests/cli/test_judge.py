"""`kqueue judge` and `kqueue duel`: verdicts without a fleet, output, exit statuses, and cleanup after an end."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kqueue import judging
from kqueue.categories import Category
from kqueue.config import load
from kqueue.contract import Outcome, Request
from kqueue.judging import LocalJudge
from kqueue.local.process import running
from tests.cli.command import Cli
from tests.samples import RELU, RELU_KERNEL
from tests.waiting import below, until

pytestmark = pytest.mark.slow("starts judges")

QUICK = ("--device", "cpu", "--checks", "1", "--no-timing")


@pytest.fixture(scope="module")
def local() -> Iterator[LocalJudge]:
    """Start one judge for all commands that run in this process."""
    with tempfile.TemporaryDirectory(prefix="kqueue-test-") as name:
        Path(name).chmod(0o711)
        with LocalJudge("cpu", config=load(scratch=Path(name))) as judge:
            yield judge


@pytest.fixture
def kept(local: LocalJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands use that judge, which outlives them."""
    monkeypatch.setattr(judging, "LocalJudge", {"cpu": local}.get)
    monkeypatch.setattr(local, "close", lambda: None)


@pytest.fixture
def cli() -> Iterator[Cli]:
    """Return the command in a folder with a problem and kernels, without any reachable service."""
    with tempfile.TemporaryDirectory(prefix="kqueue-test-") as name:
        root = Path(name)
        root.chmod(0o711)
        nowhere = {
            "KQUEUE_SCRATCH": str(root / "scratch"),
            "KQUEUE_DATABASE_URL": "postgresql+psycopg://nobody:secret@127.0.0.1:1/none",
            "KQUEUE_REDIS_URL": "redis://:secret@127.0.0.1:1/0",
        }
        ready = Cli(root, nowhere)
        ready.write("relu.py", RELU)
        ready.write("right.py", RELU_KERNEL.format("return torch.clamp(x, min=0)"))
        ready.write("wrong.py", RELU_KERNEL.format("print('trace \\x1b[31m'); return torch.relu(x) + 1"))
        ready.write("endless.py", RELU_KERNEL.format("time.sleep(600)"))
        yield ready


NO_GPU = "a cuda kernel needs a GPU, and this judge uses the CPU"


@pytest.mark.usefixtures("kept")
def test_right_and_wrong_kernels(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each judged kernel has a row, even after Ctrl-C. A failure exits with 1, Ctrl-C with 130, no GPU with 3."""
    done = cli("judge", "relu.py", "right.py", "wrong.py", *QUICK)
    assert done.returncode == 1, done.stderr
    rows = [["right.py", "passed"], ["wrong.py", "wrong_values"]]
    assert [line.split()[:2] for line in done.stdout.splitlines() if ".py" in line] == rows
    assert done.stderr.startswith("kqueue: judging on ")
    assert "secret" not in done.stderr
    refused = cli("judge", "relu.py", "right.py", "--backend", "cuda", *QUICK)
    assert (refused.returncode, refused.stderr) == (3, f"kqueue: right.py: {NO_GPU}\n")  # nothing was started

    def judged(_: LocalJudge, request: Request) -> Outcome:
        if "sleep" in request.kernel:
            raise KeyboardInterrupt
        return Outcome(category=Category.PASSED)

    monkeypatch.setattr(LocalJudge, "__call__", judged)
    done = cli("judge", "relu.py", "right.py", "endless.py", *QUICK)
    assert done.returncode == 130
    assert [line.split()[:2] for line in done.stdout.splitlines() if ".py" in line] == rows[:1]


@pytest.mark.usefixtures("kept")
def test_a_duel(cli: Cli) -> None:
    """A wrong kernel loses at once, a duel without a decision exits with 1, and bad options with 2."""
    quick = ("--device", "cpu", "--checks", "1", "--calls", "5")
    done = cli("duel", "relu.py", "wrong.py", "right.py", *quick)
    assert (done.returncode, done.stdout.splitlines()) == (
        0,
        ["A is wrong.py, B is right.py", "B wins, because A ended as wrong_values"],
    )
    done = cli("duel", "relu.py", "wrong.py", "wrong.py", *quick, "--json")
    assert (done.returncode, json.loads(done.stdout)["reason"]) == (1, "both_failed")
    for option in (("--lane", "cpu"), ("--fleet", "--device", "cpu"), ("--rounds", "1"), ("--within", "2")):
        assert cli("duel", "relu.py", "right.py", "right.py", *option).returncode == 2


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, *(pytest.param(n, marks=pytest.mark.nightly) for n in (signal.SIGINT, signal.SIGHUP))]
)
def test_json_lines_come_as_they_are_judged_and_an_end_leaves_nothing(cli: Cli, number: signal.Signals) -> None:
    """With --json each complete line is printed once its kernel is judged. A signal leaves no process and no file."""
    kernels = ("right.py", "gone.py", "wrong.py", "endless.py")
    with cli.start("judge", "relu.py", *kernels, *QUICK, "--json") as process:
        assert process.stdout is not None
        # The last kernel never ends, so these lines are printed before it.
        right, gone, wrong = (json.loads(process.stdout.readline()) for _ in range(3))
        # Its process has loaded its source, and the prewarmed candidate for the next kernel has not.
        until(lambda: any(Path(f"/proc/{pid}/cwd/kernel.py").exists() for pid in below(process.pid)), 120, "endless.py")
        started = set(below(process.pid))
        process.send_signal(number)
        assert process.stdout.read() == ""
    assert process.returncode == (-number if number is signal.SIGKILL else 130)
    until(lambda: not any(map(running, started)), what="the end of its processes")
    assert [path.name for path in (cli.directory / "scratch").iterdir()] == ["locks"]
    assert [line["input"] for line in (right, gone, wrong)] == ["right.py", "gone.py", "wrong.py"]
    assert (right["verdict"]["category"], right["verdict"]["blame"], right["error"]) == ("passed", "none", None)
    assert right["verdict"]["backend"] == "torch"
    assert right["verdict"]["environment"]["torch"]
    assert right["verdict"]["evidence"]["isolation"]["level"]
    assert (gone["verdict"], gone["error"]) == (None, "gone.py: No such file or directory")
    assert wrong["verdict"]["category"] == "wrong_values"
    assert wrong["verdict"]["log"].startswith("trace")


def test_bad_input_is_refused_at_once(cli: Cli) -> None:
    """Before a judge is started, bad arguments exit with 2 and one line that names the fix."""
    for arguments, message in (
        (("gone.py", "right.py"), "gone.py: No such file"),
        (("relu.py", "nothing-*.py"), "nothing-*.py: no file matches"),
        (("relu.py", "right.py", "--set", "checks=0"), "settings.checks: "),
        (("relu.py", "right.py", "--backend", "fortran"), "backend: Input should be"),
        (("relu.py", "right.py", "--set", "checks"), "write name=value"),
        ((f"sha256:{'0' * 64}", "right.py"), "only a fleet has stored problems"),
    ):
        done = cli("judge", *arguments)
        assert (done.returncode, message in done.stderr, len(done.stderr.splitlines())) == (2, True, 1)
    assert not (cli.directory / "scratch").exists()
