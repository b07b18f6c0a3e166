"""Autopsies: their results, and `repro.py`, which fails only with a wrong kernel."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kqueue import judging
from kqueue.categories import Category
from kqueue.contract import Outcome, Phase, Request
from kqueue.evidence import Evidence, Facts, InputTensor, WrongLocation
from kqueue.features.autopsy import report, run
from kqueue.features.autopsy.report import Report
from kqueue.features.autopsy.shrink import Autopsy, refused
from kqueue.judging import LocalJudge, request_of
from tests.features.autopsy.tail import TAIL, TAIL_KERNEL, execute, fails
from tests.samples import ended

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
#: Value of outputs before they are written.
UNWRITTEN = -1.5
#: Time limit in seconds far above the duration of these autopsies.
LONG_S = 600.0

pytestmark = [pytest.mark.slow("runs programs with torch"), pytest.mark.timeout(600)]


def judge_here(request: Request) -> Outcome:
    """Judge a kernel for one input set in this process, as a real judge does in seconds."""
    import torch

    sources: dict[str, Any] = {}
    try:
        exec(request.kernel, sources)
    except SyntaxError:
        return ended(Category.SYNTAX_ERROR)
    exec(request.problem, sources)
    [given] = sources["get_inputs"]()
    expected, got = (sources[name]()(given.clone()) for name in ("Model", "ModelNew"))
    evidence = Evidence(inputs=(InputTensor(shape=tuple(given.shape), dtype="float32"),))
    wrong = torch.nonzero(expected != got).tolist()
    if not wrong:
        return Outcome(category=Category.PASSED, evidence=evidence)
    first = tuple(
        WrongLocation(index=tuple(at), expected=expected[tuple(at)].item(), got=got[tuple(at)].item())
        for at in wrong[:1]
    )
    unwritten = int((got == UNWRITTEN).sum()) or None
    facts = Facts(output=0, kind="given", wrong=len(wrong), of=got.numel(), first=first, unwritten=unwritten)
    return ended(Category.WRONG_VALUES if got.isfinite().all() else Category.NOT_FINITE, facts=facts, evidence=evidence)


def dissect(local: Any, problem: str, kernel: str, *, most: int = 100) -> Report:
    request = request_of(problem=problem, kernel=kernel, settings={"checks": 2, "timing": {"purpose": "check"}})
    return run.by_judge(Autopsy(request, most=most), local, LONG_S, lambda _: None)


def test_a_kernel_of_the_gallery_shrinks_to_one_element(local: LocalJudge, tmp_path: Path) -> None:
    """The report has one element, and repro.py fails with the judge's message."""
    bad = EXAMPLES / "kernels" / "bad" / "segfault.py"
    report = dissect(local, (EXAMPLES / "problems" / "gelu.py").read_text(), bad.read_text())
    assert (report.category, report.ended) == (Category.CRASHED, "smallest")
    assert (report.elements_before, report.elements_after) == (512 * 1024, 1)
    fails(report.repro, tmp_path, "died of SIGSEGV")


def test_a_tail_is_found_by_bisection_with_its_first_wrong_place(tmp_path: Path) -> None:
    """The smallest failing row has 41 elements, of which the last nine are wrong. Powers of two hide the failure."""
    report = dissect(judge_here, TAIL, TAIL_KERNEL)
    assert [after.shape for after in report.after or ()] == [(1, 41)]
    assert [(change.name, change.after) for change in report.changes] == [("N", 41), ("get_inputs()", 1)]
    assert [first.index for first in (report.facts.first or ())[:1]] == [(0, 32)]
    assert "index [0, 32]" in "\n".join(report.lines())
    fails(report.repro, tmp_path)
    assert report.repro is not None
    # The same program accepts a right kernel.
    right = report.repro.replace("out[:, x.shape[1] // 32 * 32:] = 0", "pass")
    assert right != report.repro
    assert execute(right, tmp_path)[0] == 0


@pytest.mark.parametrize(
    ("body", "smallest"),
    [
        (f"out = torch.full_like(x, {UNWRITTEN}); out[:, : n // 32 * 32] = 2 * x[:, : n // 32 * 32]", (1, 33)),
        ("out = torch.zeros_like(x); out[:, : n // 32 * 32] = 2 * x[:, : n // 32 * 32]", (1, 33)),
        ("out = 2 * x; out[:, -1] = torch.nan if n > 40 else 1e3", (1, 1)),
        ("out = 2.02 * x if n > 40 else 2 * x + 1e3", (1, 41)),
    ],
    ids=["nothing is written", "nothing but zeros", "out of bounds", "rounding"],
)
def test_the_same_way_is_the_same_kind_of_difference(body: str, smallest: tuple[int, int]) -> None:
    """A shape at which the grid is empty does not count, nor does another kind. NaN can become another wrong value."""
    kernel = TAIL_KERNEL.partition("        out =")[0] + f"        n = x.shape[1]; {body}; return out\n"
    assert [after.shape for after in dissect(judge_here, TAIL, kernel).after or ()] == [smallest]


def test_it_stops_after_its_evaluations_with_the_best_so_far() -> None:
    """With two evaluations, the second is of a smaller problem on which the kernel is right."""
    report = dissect(judge_here, TAIL, TAIL_KERNEL, most=2)
    assert (report.ended, report.evaluations) == ("evaluations", 2)
    assert report.elements_after == report.elements_before == 4 * 3001
    assert report.found


def test_it_stops_in_time_with_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """The running evaluation is stopped with the judge's process, and the next request starts another one."""
    process = {"owner": os.getpid(), "ended.return_value": False, "ask.side_effect": lambda _: time.sleep(99)}
    first, second = (Mock(**process) for _ in range(2))
    monkeypatch.setattr(judging, "_Child", Mock(side_effect=[first, second]))
    local = LocalJudge("cpu")
    known = Outcome(category=Category.TIMEOUT, message="late", phase=Phase.CHECK, facts=Facts(reason="deadline"))
    report = run.by_judge(Autopsy(request_of(problem=TAIL, kernel=TAIL_KERNEL), known), local, 0.5, lambda _: None)
    assert (report.ended, report.found) == ("time", False)
    assert "it ended before the kernel was judged again" in "\n".join(report.lines())
    first.stop.assert_called_once()
    assert local.machine is second.machine


def test_what_needs_no_autopsy_is_told() -> None:
    """Passed kernels, failures that sizes do not decide, and fleet failures get no reproduction."""
    for kernel, said in (
        ("class ModelNew(", "syntax_error: this failure does not depend on inputs"),
        (TAIL_KERNEL.replace("] = 0", "] += 0"), "the kernel passed"),
    ):
        report = dissect(judge_here, TAIL, kernel)
        assert (report.ended, report.found) == ("refused", False)
        assert said in "\n".join(report.lines())
    lost = Outcome(category=Category.WORKER_LOST, message="gone")
    assert "this says nothing about the kernel" in (refused(lost) or "")


def test_a_failure_that_does_not_come_again_is_told() -> None:
    """A kernel that failed by chance gets no reproduction."""
    request = request_of(problem=TAIL, kernel=TAIL_KERNEL.replace("] = 0", "] += 0"))
    facts = Facts(reason="exited", signal="SIGSEGV")
    known = Outcome(category=Category.CRASHED, message="died", phase=Phase.CHECK, facts=facts)
    report = run.by_judge(Autopsy(request, known), judge_here, LONG_S, lambda _: None)  # type: ignore[arg-type]
    assert (report.ended, report.found) == ("not_again", False)


def test_a_check_that_comes_with_the_problem_decides_in_repro(tmp_path: Path) -> None:
    """repro.py asks the problem's check where that decided, and takes other right outputs as right."""
    check = "def check(reference_outputs, outputs, inputs):\n    return bool(outputs.abs().sum() > 0) or 'zeros'\n"
    request = request_of(problem=TAIL + check, kernel=TAIL_KERNEL, settings={"seed": 1})
    outcome = ended(Category.WRONG_VALUES, evidence=Evidence.model_validate({"checker": {"bound": 0.1}}))
    program = report.program(request, request.problem, outcome, (0,), "")
    assert execute(program, tmp_path)[0] == 0
    zeros = program.replace("out = x * 2\n", "out = x * 0\n")
    fails(zeros, tmp_path, "the problem's check() refuses the outputs: zeros")
