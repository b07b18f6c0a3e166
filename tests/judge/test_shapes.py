"""Evaluations of problems that name several shapes, on a CPU slot."""

from __future__ import annotations

import pytest

from kqueue.categories import Category
from kqueue.contract import Phase, Policies, Policy, Purpose, Request, Settings, Timing
from kqueue.evidence import SIZES_RULE
from tests.judge import extension
from tests.judge.linear import PROBLEM, QUICK, WAIT, WAITING, judge, right
from tests.judge.rig import Rig
from workers.judge.sandbox.seal import Role

pytestmark = pytest.mark.slow("judges several kernels")

SHAPES = WAITING.replace("get_inputs():", "get_inputs(rows=4, size=8):").replace("randn(4, 8)", "randn(rows, size)")
SHAPES = SHAPES.replace("get_init_inputs():", "get_init_inputs(size=8):").replace("return [8]", "return [size]")
SHAPES += """
SHAPES = [
    {"name": "small", "args": {"size": 8}},
    {"name": "wide", "args": {"size": 33}, "weight": 2.0},
    {"args": {"rows": 7}, "held_out": True},
]
"""


def test_every_shape_is_checked_and_timed(rig: Rig) -> None:
    """Each has a baseline of its own, and a row in the evidence. They share the calls of one series."""
    rig.backend.baselines.clear()
    outcome = judge(
        rig, right(WAIT), Settings(checks=1, timing=Timing(purpose=Purpose.PUBLISH, calls=10, warmup=1)), SHAPES
    )
    assert outcome.category is Category.PASSED, outcome.message
    known = outcome.evidence.shapes
    assert known is not None
    assert [row.name for row in known.rows] == ["small", "wide", "held out 1"]
    assert all(row.category is Category.PASSED and row.runtime_ms and row.speedup for row in known.rows)
    product = known.rows[0].speedup * known.rows[1].speedup ** 2 * known.rows[2].speedup  # type: ignore[operator]
    assert outcome.speedup == pytest.approx(product**0.25)
    assert outcome.runtime is not None
    assert 15 <= outcome.runtime.count < 30
    keys = [key for _, _, key in rig.backend.baselines]
    for row in known.rows:
        assert sum(f"shape={row.name}" in key for key in keys) >= 1
    problems = {problem for problem, _, _ in rig.backend.baselines}
    assert problems == {Request(problem=SHAPES, kernel="k", backend="torch").problem_hash}


def test_shapes_share_the_processes(rig: Rig) -> None:
    """Each has a new model of the class that was imported once. The log ends before the first held-out shape."""
    kernel = right(top="print('imported')\nmade = []\n").replace(
        "        self.layer",
        "        made.append(size)\n        print('made', made, flush=True)\n        self.layer",
        1,
    )
    outcome = judge(rig, kernel, QUICK, SHAPES)
    assert outcome.passed, outcome.message
    assert outcome.log.splitlines() == ["imported", "made [8]", "made [8, 33]"]
    assert rig.sealed(Role.CANDIDATE, Role.REFERENCE) == []
    stale = right("return x @ first.setdefault('weight', self.layer.weight).T + self.layer.bias", "first = {}\n")
    failed = judge(rig, stale, QUICK, SHAPES)
    assert (failed.category, failed.facts.shape) == (Category.RUNTIME_ERROR, "wide")


def test_a_shape_whose_kernel_dies_ends_the_evaluation(rig: Rig) -> None:
    """Nothing is shown of the one that is held out. The shape that was right before keeps its times."""
    timed = Settings(checks=1, timing=Timing(calls=5, warmup=0))
    dying = right(f"{WAIT}\n        if len(x) == 7: __import__('os')._exit(7)")
    outcome = judge(rig, dying, timed, SHAPES)
    assert (outcome.category, outcome.facts.shape) == (Category.CRASHED, "held out 1")
    assert outcome.facts.withheld
    small, wide, hidden = outcome.evidence.shapes.rows
    assert None not in (small.speedup, wide.speedup)
    assert hidden.speedup is None


def test_the_first_shape_that_fails_ends_the_evaluation(rig: Rig) -> None:
    """It is named, and the later ones are not judged."""
    outcome = judge(rig, right("if x.shape[1] == 33: return x * 0"), QUICK, SHAPES)
    assert (outcome.category, outcome.facts.shape) == (Category.WRONG_VALUES, "wide")
    assert outcome.message.startswith("shape wide: output 0: ")
    assert [row.category for row in outcome.evidence.shapes.rows] == [Category.PASSED, Category.WRONG_VALUES, None]
    hidden = judge(
        rig, right("print(x.shape)\n        if x.shape[0] == 7: raise ValueError(str(x.shape))"), QUICK, SHAPES
    )
    assert (hidden.category, hidden.facts.shape) == (Category.RUNTIME_ERROR, "held out 1")
    assert "[4, 8]" in hidden.log
    assert "[7, 8]" not in hidden.model_dump_json()


def test_malformed_shapes_are_the_problem_s_fault(rig: Rig) -> None:
    outcome = judge(rig, right(), QUICK, PROBLEM + "SHAPES = [{'args': {'rows': 7}}]")
    assert (outcome.category, outcome.phase) == (Category.INVALID_PROBLEM, Phase.REFERENCE)
    assert "the argument 'rows', which neither get_inputs() nor get_init_inputs() takes" in outcome.message


def test_a_kernel_is_compiled_once(rig: Rig) -> None:
    """All shapes use the libraries of the first."""
    problem = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return x * (2 if len(x) == 4 else 3)
def get_inputs(n):
    return [torch.rand(n)]
SHAPES = [{"args": {"n": 4}}, {"args": {"n": 5}}]
"""
    outcome = rig.judge(Request(problem=problem, kernel=extension.kernel(), backend="cpp", settings=extension.QUICK))
    assert (outcome.category, outcome.facts.shape) == (Category.WRONG_VALUES, "n=5")
    assert outcome.evidence.build is not None
    assert (outcome.evidence.build.where, outcome.evidence.build.libraries) == ("builder", 1)


def test_a_kernel_can_be_judged_on_further_sizes(rig: Rig) -> None:
    """One that fails on them gets a finding, or is rejected. The reference can refuse them."""
    problem = PROBLEM.replace("4, 8)", "ROWS, 32)").replace("[8]", "[32]") + "\nROWS = 64\n"
    flag, reject = (QUICK.model_copy(update={"policies": Policies(shapes=one)}) for one in (Policy.FLAG, Policy.REJECT))
    special = right("assert len(x) in (32, 64, 128) and x.shape[1] == 32")
    flagged, rejected = (judge(rig, special, policy, problem) for policy in (flag, reject))
    assert (rejected.category, flagged.passed) == (Category.REJECTED_BY_POLICY, "other sizes" in flagged.message)
    assert "instead of 32" in next(one.evidence for one in flagged.evidence.findings if one.rule == SIZES_RULE)
    assert len(judge(rig, right(), flag, problem).evidence.sizes) == 3
    strict = problem.replace("return self", "assert x.shape == (64, 32)\n        return self")
    assert judge(rig, right(), reject, strict).evidence.sizes == ()
