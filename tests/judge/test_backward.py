"""Evaluations that check gradients and time forward and backward, on a CPU slot."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kqueue.categories import Category
from kqueue.contract import Outcome, Request, Settings, Timing
from tests.judge.rig import Rig
from workers.judge.channel.orders import Gradients
from workers.judge.channel.tensors import TensorSpec
from workers.judge.ending import EvaluationEnded
from workers.judge.pipeline.cases import Case, Form
from workers.judge.pipeline.compare import check_values

pytestmark = pytest.mark.slow("judges several kernels")

MODEL = """(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.linear = torch.nn.Linear(size, size)
        self.register_buffer("mean", torch.zeros(size))
    def forward(self, x, rows, unused):
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))"""
#: The second input is an index, the third has no influence, and the running mean is a buffer that each call changes.
PROBLEM = f"""
import torch
BACKWARD = True
class Model{MODEL}
        return torch.tanh(self.linear(x))[rows] + self.mean, {{"x": x * 2}}
def get_inputs():
    return [torch.randn(4, 8), torch.randint(4, (3,)), torch.randn(2)]
def get_init_inputs():
    return [8]
"""
KERNEL = """
import torch
class Layer(torch.autograd.Function):
    cached = None
    @staticmethod
    def forward(ctx, x, rows, unused, weight, bias):
        y = torch.tanh(x @ weight.t() + bias)
        ctx.save_for_backward(x, rows, weight, y)
        return y[rows]
    @staticmethod
    def backward(ctx, upstream):
        x, rows, weight, y = ctx.saved_tensors
        grad = torch.zeros_like(y).index_add_(0, rows, upstream) * (1 - y * y)
        result = [grad @ weight, None, None, grad.t() @ x, grad.sum(0)]
        {backward}
        return tuple(result)
class ModelNew{model}
        y = Layer.apply(x, rows, unused, self.linear.weight, self.linear.bias) + self.mean
        {forward}
        return y, {{"x": x * 2}}
"""
QUICK = Settings(checks=2, timing=Timing().off())
TIMED = Settings(checks=1, timing=Timing(calls=10, warmup=1))


def judge(
    rig: Rig, settings: Settings = QUICK, problem: str = PROBLEM, *, backward: str = "pass", forward: str = "pass"
) -> Outcome:
    kernel = KERNEL.format(model=MODEL, backward=backward, forward=forward)
    return rig.judge(Request(problem=problem, kernel=kernel, backend="torch", settings=settings))


def test_right_gradients_pass_with_a_time_for_each_pass(rig: Rig) -> None:
    outcome = judge(rig, TIMED)
    assert outcome.category is Category.PASSED, outcome.message + outcome.log
    evidence = outcome.evidence
    assert evidence.gradients == ("inputs[0]", "weight linear.weight", "weight linear.bias")
    assert [one.shape for one in evidence.inputs or ()] == [(4, 8), (3,), (2,)]
    assert evidence.checks is not None
    assert evidence.checks > 1
    assert evidence.verified_calls
    assert evidence.passes is not None
    forward, backward, both = evidence.passes
    assert (forward.name, backward.name, both.name) == ("forward", "backward", "both")
    assert (both.runtime_ms, both.speedup, both.speedup_interval) == (
        outcome.runtime_ms, outcome.speedup, outcome.speedup_interval,
    )  # fmt: skip
    # The noise of a difference can exceed it.
    difference = both.runtime_ms - forward.runtime_ms
    assert backward.runtime_ms == (pytest.approx(difference) if difference > 0 else None)
    assert {key.rpartition("pass=")[2] for _, _, key in rig.backend.baselines if "pass=" in key} == {"both", "forward"}


def test_a_gradient_may_be_on_either_side_of_a_kink() -> None:
    """A kernel can have the gradient of either side where the reference's gradient jumps."""
    found = torch.rand(8, 8) + 1
    wanted = Gradients(("inputs[0]",), (), (0,), (0,), ())
    specs = (TensorSpec.of(found),) * 2
    form = Form(structure="Tensor", output_specs=specs, output_aliases=(None,) * 2, paths=("", "inputs[0]"))
    form.gradients = wanted
    other = found.clone()
    other[3] = 0.0
    case = Case(seed=0, outputs=[found, found], form=form, moved=lambda: [[found, found], [found, other]])
    figures = check_values([found, other], case, QUICK).errors
    assert (figures.strict_correct, figures.jumps) == (True, 8)
    half = found.clone()
    half[:4] = 0.0
    elsewhere, all_of_it = found.clone(), replace(case, moved=lambda: [[found, half]])
    elsewhere[4] = 0.0
    for gradient, one in ((elsewhere, case), (other, replace(case, moved=tuple)), (half, all_of_it)):
        with pytest.raises(EvaluationEnded, match=r"gradient of inputs\[0\]: "):
            check_values([found, gradient], one, QUICK)
    with pytest.raises(EvaluationEnded, match="output 0: "):
        check_values([other, found], case, QUICK)


@pytest.mark.parametrize(
    ("backward", "forward", "category", "words"),
    [
        ("result[0] = result[0] * 1.01", "pass", Category.WRONG_VALUES, "gradient of inputs[0]: "),
        ("result[3] = result[3].flip(0)", "pass", Category.WRONG_VALUES, "gradient of weight linear.weight: "),
        ("Layer.cached = result = Layer.cached or result", "pass", Category.WRONG_VALUES, "gradient of inputs[0]: "),
        ("pass", "y = y.detach()", Category.RUNTIME_ERROR, "computes a gradient itself, that backward must"),
        ("upstream.zero_()", "pass", Category.INPUT_MUTATED, "changed its upstream gradient of output 0"),
        ("pass", "y = y[:2]", Category.WRONG_SHAPE, "output 0 has shape (2, 8), not (3, 8)"),
    ],
)
def test_a_wrong_gradient_is_the_kernel_s_fault(
    rig: Rig, backward: str, forward: str, category: Category, words: str
) -> None:
    """It is named in Python's notation, with the necessary change."""
    outcome = judge(rig, backward=backward, forward=forward)
    assert outcome.category is category, outcome.message + outcome.log
    assert words in outcome.message
    if category is Category.WRONG_VALUES:
        assert outcome.facts.effect == words.removesuffix(": ")
