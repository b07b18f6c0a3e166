"""The check that comes with a problem, its own faults, and what the judge checks before it."""

from __future__ import annotations

import textwrap

import pytest
import torch

from kqueue.categories import Blame, Category
from kqueue.contract import Comparison, Purpose, Settings, Timing
from kqueue.evidence import Checker
from tests.judge.linear import judge
from tests.judge.loopback import first_of, reference
from tests.judge.rig import Rig
from tests.judge.sources import kernel, problem
from workers.judge.channel.marks import mark
from workers.judge.ending import EvaluationEnded
from workers.judge.pipeline import compare, static
from workers.judge.pipeline.cases import GIVEN
from workers.judge.pipeline.reference import Reference

ROTATIONS = """
import torch
class Model(torch.nn.Module):
    def forward(self, a):
        return dict(zip(("l", "q"), torch.linalg.eigh(a)))
def get_inputs():
    a = torch.randn(4, 12, 12)
    return [a + a.mT]
def check(reference_outputs, outputs, inputs):
    l, q, [a] = outputs["l"], outputs["q"], inputs
    if not (l - reference_outputs["l"]).abs().max() <= 1e-4 * a.abs().max():
        return "other eigenvalues"
    if not (a @ q - q * l[:, None]).abs().max() <= 1e-4 * a.abs().max():
        return "A Q is not Q L"
    a.zero_(), reference_outputs["l"].zero_()  # These are copies.
    return bool((q.mT @ q - torch.eye(12, device=q.device)).abs().max() <= 1e-4)
CHECK_BOUND = 1e-2
"""
SIGNS = "q * torch.where(q[..., :1, :] < 0, -1.0, 1.0)"


def eigh(q: str) -> str:
    signature = "self, a"
    return f"""
import torch
class ModelNew(torch.nn.Module):
    def forward({signature}):
        l, q = torch.linalg.eigh(a)
        return {{"l": l, "q": {q}}}
"""


def with_check(body: str, forward: str = "x: x * 2", bound: float = 0.05) -> str:
    lines = textwrap.indent(body, "    ")
    return f"{problem(forward)}\ndef check(reference_outputs, outputs, inputs):\n{lines}\nCHECK_BOUND = {bound}\n"


def proven(source: str) -> Reference:
    made = reference(source)
    first = first_of(made)
    assert made.checker is not None
    made.checker.prove([case for case in made.answer(first, *made.more_cases(first)) if case.kind == GIVEN])
    return made


def test_the_check_decides_for_the_problem_s_inputs_variants_and_timed_calls(rig: Rig) -> None:
    """Other signs of eigenvectors are right, and the verdict says who decided. KernelBench's rule has no check."""
    outcome = judge(rig, eigh(SIGNS), Settings(checks=2, timing=Timing(calls=5, warmup=0)), ROTATIONS)
    assert outcome.passed, outcome
    assert outcome.evidence.checker == Checker(bound=0.01)
    assert outcome.evidence.checks > (outcome.evidence.checks_asked or 0) == 2
    assert outcome.evidence.verified_calls
    assert outcome.message.endswith("; but the problem's own check() decided, which refuses changes of 0.01")
    off = judge(rig, eigh("q * 1.001"), problem=ROTATIONS)
    assert (off.category, off.blame) == (Category.WRONG_VALUES, Blame.CANDIDATE)
    assert off.message == "the problem's check() refuses the outputs: it returned False"
    late = "a.sum() * 0 + q * (1 + 0.1 * (self.__dict__.setdefault('n', []).append(0) or len(self.n) > 16))"
    timed = judge(
        rig, eigh(late), Settings(checks=2, timing=Timing(purpose=Purpose.PUBLISH, calls=50, warmup=0)), ROTATIONS
    )
    assert timed.category is Category.NONDETERMINISTIC, timed
    assert reference(ROTATIONS, comparison=Comparison.KERNELBENCH).checker is None


ANY = "(outputs - reference_outputs).abs().max()"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return False", "check() refuses the reference's own outputs: it returned False"),
        ("return 'they are late'", "check() refuses the reference's own outputs: they are late"),
        ("return True", "check() accepts zeros as output 0, so it cannot decide: it must refuse them"),
        (f"return not ({ANY} > 1)", "check() accepts values that differ by more than CHECK_BOUND = 0.05 as output 0"),
        (
            "a, b = outputs + 1, reference_outputs + 1\nreturn not ((a * a - a * b).abs().max() > 0.1)",
            "check() accepts infinity or the largest integers as output 0",
        ),
        (
            "return outputs.tolist() and inputs[2]",
            "check() raised IndexError: list index out of range. For any outputs it must return",
        ),
        (f"return {ANY} < 0.1", "check() returned a value of the type Tensor. For any outputs it must return"),
        ("pass", "check() returned a value of the type NoneType. For any outputs it must return"),
    ],
)
def test_a_check_that_is_none_is_the_problem_s_fault(body: str, words: str) -> None:
    """It must accept the reference's outputs, refuse all others that the judge tries, and return an answer."""
    with pytest.raises(EvaluationEnded) as ended:
        proven(with_check(body))
    assert ended.value.outcome.category is Category.INVALID_PROBLEM
    assert ended.value.outcome.message.startswith(words)


def test_an_output_that_the_check_ignores_is_named() -> None:
    """Each of several outputs is replaced alone. Another order can be right, so it is only a label."""
    two = "x: (x * 2, [x + 1])"
    with pytest.raises(
        EvaluationEnded, match=r"check\(\) accepts zeros as output 1 at \[1\]\[0\], so it cannot decide"
    ):
        proven(
            with_check(f"outputs, reference_outputs = outputs[0], reference_outputs[0]\nreturn bool({ANY} < 0.1)", two)
        )
    made = proven(
        with_check("return bool((outputs.sort(0)[0] - reference_outputs.sort(0)[0]).abs().sum() < 0.1)", "x: x[0]")
    )
    assert made.checker is not None
    assert made.checker.accepted == ["the reference's values in another order as output 0"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool, torch.complex64])
def test_memory_and_nan_are_refused_before_the_check_is_asked(dtype: torch.dtype) -> None:
    """The check is asked about written numbers only, whatever the dtype, and decides about these."""
    body = "return bool((outputs == reference_outputs).all()) or 'unequal'"
    made = proven(with_check(body, f"x: (4 * x).to({dtype})"))
    first = made.case
    assert first is not None
    [right] = first.outputs
    compare.check_values([right.clone()], first, made.settings)
    unequal = "the problem's check() refuses the outputs: unequal"
    wrong = [(unequal, ~right if dtype is torch.bool else right + 1)]
    if dtype is torch.float32:
        wrong += [("output 0: 32 of 32 values are NaN, which", right * torch.nan)]
    if dtype is torch.bfloat16:
        wrong += [(unequal, torch.full_like(right, -1.4921875))]  # The number marks memory, but occurs by chance.
    if dtype is not torch.bool:
        mark(unwritten := right.clone())
        of = right.numel() << dtype.is_complex
        wrong += [(f"output 0: {of} of {of} values were never written", unwritten)]
    for message, out in wrong:
        ended = compare.check_each([([out], first)], made.settings)[0]
        assert isinstance(ended, EvaluationEnded)
        assert ended.outcome.message.startswith(message)


def test_a_check_with_its_own_randomness_and_gradients(rig: Rig) -> None:
    """Random numbers of a kernel are right if the check finds them so. Gradients stay compared by the judge."""
    rounded = "x: (x + torch.rand_like(x) * 0.01)"
    body = "d = outputs - inputs[0]\nreturn bool((d >= -1e-6).all() and (d <= 0.0101).all())"
    outcome = judge(rig, kernel(rounded.replace("rand_like(x)", "rand(x.shape)")), problem=with_check(body, rounded))
    assert outcome.passed, outcome
    source = with_check(f"return bool({ANY} < 1e-3)", "x: x * x") + "BACKWARD = True\n"
    wrong = judge(rig, kernel("x: x * x.detach()"), problem=source)
    assert wrong.message.startswith("gradient of inputs[0]: "), wrong


def test_larger_outputs_than_can_be_kept_whole_have_no_check() -> None:
    """Timed calls of larger outputs are kept in pieces, which no check can read."""
    with pytest.raises(EvaluationEnded, match=r"a problem with check\(\) can return 64 tensors of \d+ bytes in total"):
        first_of(reference(with_check("return True", "x: [x] * 65")))


@pytest.mark.parametrize(
    ("lines", "bound"),
    [
        ("def check(reference_outputs, outputs, inputs): ...\nCHECK_BOUND = 1e-2", 0.01),
        ("def check(a, b, c): ...\nCHECK_BOUND: float = 1", 1.0),
        ("def check(): ...", None),
        ("CHECK_BOUND = 1e-2", ""),
        ("def check(reference_outputs, outputs, inputs): ...", ""),
        ("def check(reference_outputs, outputs, inputs): ...\nCHECK_BOUND = 0", ""),
        ("def check(reference_outputs, outputs, inputs): ...\nCHECK_BOUND = 1 / 100", ""),
        ("def check(reference_outputs, outputs, inputs): ...\nCHECK_BOUND = CHECK_BOUND = 1e-2\nCHECK_BOUND = 1", ""),
    ],
)
def test_a_check_and_its_bound_belong_together(lines: str, bound: float | str | None) -> None:
    """They are read and not run. A function check with other arguments and without a bound is not the judge's."""
    if bound != "":
        assert static.check_bound(lines) == bound
        return
    with pytest.raises(EvaluationEnded, match=r"defines check\(reference_outputs, outputs, inputs\) and states once"):
        static.check_bound(lines)
