"""`kqueue autopsy`: output, written files and refusals, with a stand-in for the workers."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

from sqlalchemy import Engine

from kqueue.contract import Request
from kqueue.store import evaluations
from tests.cli.command import Cli, Judgement, judge
from tests.features.autopsy.tail import TAIL, TAIL_KERNEL
from tests.store.steps import count
from tests.web.reading import found_wrong


def test_an_evaluation_is_shrunk(cli: Cli, engine: Engine, worker: UUID, judging: Callable[[Judgement], None]) -> None:
    """An id is enough to write the report and the reproduction, and no evaluation is left running."""
    [asked] = evaluations.submit(engine, [Request(problem=TAIL, kernel=TAIL_KERNEL, backend="torch", lane="cpu")])
    judge(engine, worker, lambda _: found_wrong())
    judging(lambda _: found_wrong())
    done = cli("autopsy", str(asked.evaluation_id)[:13], "--out", "found", "--budget", "100")
    assert done.returncode == 0, done.stderr
    assert "wrong_values" in done.stdout
    assert "float32 (1 evaluation)" in done.stderr
    assert "inputs: [4, 3001] float32 ->" in done.stdout
    compile((cli.directory / "found" / "repro.py").read_text(), "repro.py", "exec")
    assert count(engine, "evaluations", f"batch = 'autopsy-{asked.evaluation_id}'") > 1
    assert count(engine, "evaluations", "state <> 'done'") == 0


def test_what_cannot_be_looked_into(cli: Cli, worker: UUID) -> None:
    cli.write("tail.py", TAIL)
    cli.write("kernel.py", TAIL_KERNEL)
    for arguments, status, said in (
        (("--problem", "gone.py", "kernel.py"), 2, "gone.py"),
        (("00000000-0000-0000-0000-000000000000",), 5, "no evaluation has the id"),
        (("abcd", "--lane", "cpu"), 2, "an evaluation's options are fixed"),
        (("--problem", "tail.py", "kernel.py", "--lane", "cpu", "--device", "cpu"), 2, "give one"),
    ):
        done = cli("autopsy", *arguments)
        assert (done.returncode, said in done.stderr) == (status, True), done.stderr
