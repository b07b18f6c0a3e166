"""`kqueue judge`: verdicts without a fleet, output, exit statuses, and cleanup after Ctrl-C."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.command import Cli
from tests.samples import RELU, RELU_KERNEL
from tests.waiting import alive, until
from workers.judge.host import linux

pytestmark = pytest.mark.slow("each command starts a judge")

QUICK = ("--device", "cpu", "--checks", "1", "--no-timing")


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


def below(pid: int) -> set[int]:
    children = set(linux.children(pid))
    return children.union(*map(below, children))


def test_right_and_wrong_kernels(cli: Cli) -> None:
    """Each kernel has a row, one wrong kernel makes the status 1, and stderr names the device."""
    done = cli("judge", "relu.py", "right.py", "wrong.py", "--device", "cpu", "--checks", "1", "--calls", "5")
    assert done.returncode == 1, done.stderr
    rows = [line.split()[:2] for line in done.stdout.splitlines() if ".py" in line]
    assert rows == [["right.py", "passed"], ["wrong.py", "wrong_values"]]
    assert done.stderr.startswith("kqueue: judging on ")
    assert "secret" not in done.stderr


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


def test_json_lines_come_as_they_are_judged(cli: Cli) -> None:
    """With --json each kernel's complete line is printed in order as soon as it is judged."""
    kernels = ("right.py", "gone.py", "wrong.py", "endless.py")
    with cli.start("judge", "relu.py", *kernels, *QUICK, "--json") as process:
        assert process.stdout is not None
        # The last kernel never ends, so these lines are printed before it.
        right, gone, wrong = (json.loads(process.stdout.readline()) for _ in range(3))
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == ""
    assert process.returncode == 130
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


def test_a_machine_that_cannot_judge(cli: Cli) -> None:
    """A missing device and a kernel that needs a GPU exit with 3."""
    for arguments, message in (
        (("--device", "977"), "device=977: no GPU 977"),
        (("--backend", "cuda", *QUICK), "a cuda kernel needs a GPU"),
    ):
        done = cli("judge", "relu.py", "right.py", *arguments)
        assert (done.returncode, message in done.stderr) == (3, True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["SIGINT", "SIGKILL"])
def test_nothing_is_left_when_it_is_ended(cli: Cli, number: signal.Signals) -> None:
    """Ctrl-C and SIGKILL leave no process and no file of a running kernel."""
    with cli.start("judge", "relu.py", "endless.py", *QUICK) as process:
        until(lambda: any(name(pid) == "kq-candidate" for pid in below(process.pid)), 120, "the candidate")
        started = below(process.pid)
        process.send_signal(number)
        process.communicate()
    assert process.returncode == (-number if number is signal.SIGKILL else 130)
    until(lambda: not any(map(alive, started)), what="the end of its processes")
    assert [path.name for path in (cli.directory / "scratch").iterdir()] == ["locks"]


def name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
