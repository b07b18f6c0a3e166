"""`kqueue judge`: verdicts without a fleet, output, exit statuses, and cleanup after an end."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from kqueue.categories import Category
from kqueue.contract import Outcome, Request
from kqueue.judging import LocalJudge
from kqueue.local.process import running
from tests.cli.command import Cli
from tests.cli.machine import *  # noqa: F403
from tests.waiting import below, until

pytestmark = pytest.mark.slow("starts judges")

QUICK = ("--device", "cpu", "--checks", "1", "--no-timing")


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
    cli.write("found/wrong", "no folder")
    done = cli("judge", "relu.py", "wrong.py", "right.py", *QUICK, "--autopsy", "found")
    assert (done.returncode, "kqueue: wrong.py: found/wrong/repro.py cannot be written" in done.stderr) == (3, True)
    assert [line.split()[:2] for line in done.stdout.splitlines() if ".py" in line] == rows[::-1]
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
        (("relu.py", "right.py", "--autopsy", "relu.py/x"), "relu.py/x: Not a directory"),
        ((f"sha256:{'0' * 64}", "right.py"), "only a fleet has stored problems"),
    ):
        done = cli("judge", *arguments)
        assert (done.returncode, message in done.stderr, len(done.stderr.splitlines())) == (2, True, 1)
    assert not (cli.directory / "scratch").exists()
    done = cli("judge", "relu.py", "right.py", *QUICK, KQUEUE_SCRATCH="/proc/x")
    assert (done.returncode, "KQUEUE_SCRATCH: /proc/x: No such file" in done.stderr) == (3, True)
