"""SIGTERM and SIGHUP end a command like Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cli.command import COMMAND, Cli
from tests.samples import RELU, RELU_KERNEL


@pytest.mark.slow("starts a judge")
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.nightly)], ids=["SIGTERM", "SIGHUP"]
)
def test_verdicts_so_far_are_printed(tmp_path: Path, number: signal.Signals) -> None:
    """`kqueue judge` prints its table of the judged kernels and exits with 130."""
    cli = Cli(tmp_path, {"KQUEUE_SCRATCH": str(tmp_path / "scratch")})
    cli.write("relu.py", RELU)
    cli.write("a.py", RELU_KERNEL.format("return torch.relu(x) + 1"))
    cli.write("b.py", RELU_KERNEL.format("time.sleep(600)"))
    command = [*COMMAND, "judge", "relu.py", "a.py", "b.py", "--device", "cpu", "--no-timing"]
    terminal, theirs = os.openpty()
    with (
        os.fdopen(terminal, "rb", buffering=0) as bar,
        subprocess.Popen(
            command, cwd=tmp_path, env=os.environ | cli.environment, stdout=subprocess.PIPE, stderr=theirs, text=True
        ) as process,
    ):
        os.close(theirs)
        shown = b""
        while b"1 wrong_values" not in shown:  # the first kernel was judged
            shown += bar.read(4096)
        process.send_signal(number)
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert [line.split()[:2] for line in out.splitlines() if ".py" in line] == [["a.py", "wrong_values"]]
