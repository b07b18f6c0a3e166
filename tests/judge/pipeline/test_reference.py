"""The reference: its inputs, its answers, and variants of its inputs."""

from __future__ import annotations

import inspect
import random
import textwrap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch

from kqueue.contract import Comparison, Precision, Settings, Tolerance
from tests.judge.loopback import PATIENT, first_of, reference
from tests.judge.sources import problem
from workers.judge.channel.bits import checksum
from workers.judge.channel.layout import put_back
from workers.judge.ending import EvaluationEnded
from workers.judge.pipeline import compare
from workers.judge.pipeline.cases import DTYPES, GIVEN, Case
from workers.judge.pipeline.proxy import ReferenceProxy
from workers.judge.pipeline.reference import Bounds, Reference

SOURCE = """
import torch
class Model(torch.nn.Module):
    def __init__(self, *args):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
    def forward(self, x):
        {forward}
def get_inputs():
    {inputs}
def get_init_inputs():
    return []
"""
RANDN = "return [torch.randn(16, 8)]"
#: A tensor of numpy's numbers, in which torch sees no draw.
NUMPY = "torch.from_numpy(__import__('numpy').random.rand(8, 8)).float()"
#: Statements that draw inputs from the generators of torch, Python and numpy.
DRAWN = [
    RANDN,
    "import random; return [torch.tensor([[random.random()]])]",
    "import numpy; return [torch.from_numpy(numpy.random.rand(4, 8).astype('float32'))]",
]


def loaded(forward: str, inputs: str = RANDN, **settings: Any) -> Reference:
    return reference(SOURCE.format(forward=textwrap.indent(forward, " " * 8).strip(), inputs=inputs), **settings)


def bounded(**bounds: Any) -> Reference:
    """Return the reference of a small problem, with other bounds for exact answers and variants."""
    return reference(SOURCE.format(forward="return x * 2", inputs=RANDN), bounds=replace(PATIENT, **bounds))


def cases_of(made: Reference) -> list[Case]:
    first = first_of(made)
    return [first, *made.more_cases(first)]


def answered(made: Reference) -> list[Case]:
    return [case for case in cases_of(made) if made.answer(case)]


def inputs_of(made: Reference, case: Case) -> list[torch.Tensor]:
    """Return the inputs of a case as a model gets them."""
    return put_back(case.inputs, made.form.views)


def kinds(made: Reference) -> set[str]:
    return {case.kind for case in answered(made)}


#: Kinds of one draw of few values that stay in its range, and all kinds of it.
WITHIN = {"sparse", "blocks", "clustered", "divided"}
ALL = {GIVEN, *WITHIN, "scaled", "uniform", "integers", "adversarial"}


def test_normal_inputs_of_a_smooth_problem_have_every_variant() -> None:
    cases = answered(loaded("return torch.nn.functional.gelu(self.layer(x))"))
    assert [case.kind for case in cases[:3]] == [GIVEN] * 3
    assert {case.kind for case in cases} == ALL
    assert len(cases) == 11
    first = cases[0]
    for case in cases[1:]:
        assert case.inputs[0].shape == first.inputs[0].shape
        assert case.inputs[0].dtype == first.inputs[0].dtype
        assert not torch.equal(case.inputs[0], first.inputs[0])
        assert case.exact is not None
        assert case.exact[0].dtype is torch.float64
        torch.testing.assert_close(case.exact[0].float(), case.outputs[0], rtol=1e-4, atol=1e-4)


def test_masks_nan_complex_draws_and_small_values_leave_variants() -> None:
    """Nudged inputs leave a mask as it is, and rows of small values nearly, so a variance without eps is found."""
    assert kinds(loaded("return x.where(torch.arange(8) > 3, -torch.inf)")) >= {"scaled"}
    padded = "x = torch.randn(16, 8); x[:, 5] = torch.nan; return [x]"
    assert kinds(loaded("return x.nan_to_num(0.0)", padded)) >= {"sparse", "scaled"}
    assert kinds(loaded("return torch.nn.functional.layer_norm(x, (8,))")) >= {"sparse", "scaled"}
    source = SOURCE.replace("forward(self, x)", "forward(self, x, mask)")
    for hidden in ("float('-inf')", "-1e9"):
        inputs = f"return [torch.randn(8, 8), torch.full((8, 8), {hidden}).triu(1)]"
        assert kinds(reference(source.format(forward="return torch.softmax(x + mask, 1)", inputs=inputs))) >= {"scaled"}
    empty = source.format(forward="return x * 2", inputs="return [torch.randn(8, 8), torch.randn(8, 0)]")
    assert kinds(reference(empty)) >= {"scaled"}
    assert kinds(loaded("return x.abs()", "return [torch.randn(16, 8, dtype=torch.complex64)]")) >= {"scaled"}


def test_numbers_of_other_generators_and_of_many_draws_have_variants() -> None:
    assert kinds(loaded("return x * 2", "return [torch.cat([torch.randn(1, 8) for _ in range(40)])]")) > ALL
    cases = answered(loaded("return x * 2", f"return [9 * {NUMPY} - 4]"))
    assert {case.kind for case in cases} == {GIVEN, "sparse", "scaled"}
    assert all(bool((case.inputs[0].abs() < 5).all()) for case in cases)


def test_an_answer_to_nudged_inputs_without_memory_ends_nothing() -> None:
    """It could only excuse a kernel, so the evaluation goes on without it."""
    forward = "if (x * 256).frac().any(): raise torch.OutOfMemoryError('CUDA out of memory')\nreturn x * 2"
    made = loaded(forward, "return [torch.randint(1, 256, (16, 8)) / 256]")
    assert [again() for again in (first_of(made).again,) if again is not None] == [None]
    assert made.answer(made.cache.new())


def test_a_list_of_tolerances_has_one_for_each_output() -> None:
    """A list that does not fit what forward returns is the problem's fault, whoever gives it. Gradients need none."""
    listed = [{"atol": 1e-3, "rtol": 0}, None]
    words = r"invalid_problem: the list of tolerances has 2 entries, and forward returns 1 tensors: give one for each"
    source = SOURCE.format(forward="return x * 2", inputs=RANDN)
    for text, settings in ((source, {"tolerances": listed}), (f"{source}\nOUTPUT_TOLERANCE = {listed}", {})):
        with pytest.raises(EvaluationEnded, match=words):
            first_of(reference(text, **settings))
        first_of(reference(text.replace("x * 2", "x * 2, x.sum()"), **settings))


@pytest.mark.parametrize(
    ("inputs", "holds"),
    [
        ("return [torch.softmax(torch.randn(16, 8), -1)]", lambda x: torch.allclose(x.sum(-1), torch.ones(16))),
        ("x = torch.rand(16, 8) + .1; return [x / x.sum(0)]", lambda x: torch.allclose(x.sum(0), torch.ones(8))),
        ("return [torch.sigmoid(torch.randn(16, 8))]", lambda x: bool(((x >= 0) & (x <= 1)).all())),
        ("return [torch.randn(16, 8).abs() + 0.5]", lambda x: bool((x >= 0.5).all())),
        ("a = torch.randn(8, 8); return [a @ a.T]", lambda x: torch.equal(x, x.T)),
        ("return [torch.tril(torch.randn(32, 32))]", lambda x: torch.equal(x, x.tril())),
        ("return [torch.randn(16, 8).sort().values]", lambda x: bool((x.diff() >= 0).all())),
        ("x = torch.randn(16, 4); return [torch.cat((x, x), 1)]", lambda x: torch.equal(x[:, :4], x[:, 4:])),
        ("return [torch.randn(1, 32).expand(16, 32)]", lambda x: torch.equal(x, x[:1].expand(16, 32))),
        ("return [torch.empty(16, 8).uniform_(2, 3)]", lambda x: bool(((x >= 2) & (x <= 3)).all())),
        (f"a = {NUMPY}; return [(a + a.T).tril()]", lambda x: torch.equal(x, x.tril())),
        (f"a = {NUMPY}; return [a + a.T]", lambda x: torch.equal(x, x.T)),
        (f"a = {NUMPY}; return [2 + a.sort().values]", lambda x: bool(((x.diff() >= 0) & (x[:, 1:] >= 2)).all())),
    ],
    ids=[
        *("rows", "columns", "shares", "positive", "symmetric", "triangular", "sorted", "halves", "expanded", "range"),
        *("triangular-numpy", "symmetric-numpy", "sorted-numpy"),
    ],
)
def test_variants_keep_what_get_inputs_makes_of_its_draws(inputs: str, holds: Callable[[torch.Tensor], bool]) -> None:
    cases = cases_of(made := loaded("return x * 2.0", inputs))
    varied = [case.inputs[0] for case in cases if case.kind != GIVEN]
    assert varied
    assert all(holds(inputs_of(made, case)[0]) for case in cases)
    assert not any(torch.equal(x, cases[0].inputs[0]) for x in varied)


def test_a_number_that_follows_from_drawn_values_is_a_tensor() -> None:
    """It is computed again for each variant. As a plain number it is refused with this remedy."""
    inputs = "lengths = torch.randint(1, 99, (16,)); return [torch.randn(16, 8), lengths, {}]"
    made = reference(problem("x, lengths, n: x * lengths[:, None] / n", inputs.format("lengths.max()")))
    varied = [inputs_of(made, case) for case in cases_of(made) if case.kind != GIVEN]
    assert len(varied) > 2
    assert all(n == lengths.max() for _, lengths, n in varied)
    with pytest.raises(
        EvaluationEnded, match=r"return numbers that follow from drawn values as tensors, .* = \d+, and"
    ):
        cases_of(reference(problem("x, lengths, n: x[:n]", inputs.format("int(lengths.sum())"))))


def test_masks_and_tables_are_not_varied() -> None:
    for inputs, others in (
        ("return [(torch.rand(16, 8) > 0.5).float()]", set()),
        ("return [torch.zeros(16, 8).masked_fill(torch.rand(16, 8) > 0.5, float('-inf'))]", set()),
        ("return [torch.eye(8)[torch.randn(16, 8).argmax(1)]]", set()),
        ("return [torch.randint(0, 2, (16, 8)).bool().float()]", set()),
        ("return [torch.randint(0, 9, (16, 8)).float()]", {"clustered", "skewed"}),
        ("return [torch.arange(128.0).reshape(16, 8).cos()]", set()),
        ("g = torch.Generator().manual_seed(1); return [torch.randn(16, 8, generator=g)]", set()),
        ("return [torch.full((16, 8), float('inf'))]", set()),
    ):
        first, *more = cases_of(loaded("return x.clamp(-9, 9) * 2.0", inputs, checks=1))
        assert {case.kind for case in more} == others, inputs
        values = first.inputs[0].flatten().sort().values
        moved = [case.inputs[0].flatten().sort().values for case in more if case.kind == "clustered"]
        assert all(torch.equal(values, each) for each in moved), inputs


@pytest.mark.parametrize(
    ("inputs", "kept"),
    [
        ("return [torch.randn(16, 8), torch.randn(16, 8) > 0]", lambda x, y, given: torch.equal(y, given)),
        ("return [torch.randn(16, 8), torch.randint(0, 8, (16,))]", lambda x, y, given: torch.equal(y, given)),
        ("return [torch.randn(16, 8), torch.arange(8.0).sin()]", lambda x, y, given: torch.equal(y, given)),
        ("x = torch.randn(16, 8); return [x, x]", lambda x, y, given: torch.equal(x, y)),
        ("x = torch.randn(16, 8); return [x, x.T]", lambda x, y, given: torch.equal(x.T, y)),
        ("x = torch.randn(16, 8); return [x, x.mean(1)]", lambda x, y, given: torch.equal(x.mean(1), y)),
    ],
    ids=["mask", "indices", "table", "same", "view", "derived"],
)
def test_inputs_beside_a_varied_one_stay_true_to_it(
    inputs: str, kept: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], bool]
) -> None:
    """Discrete inputs and tables stay as given, and an input that is derived from a varied one is derived again."""
    source = SOURCE.replace("forward(self, x)", "forward(self, x, y)").format(forward="return x + 0", inputs=inputs)
    given, *others = cases_of(made := reference(source, checks=1))
    assert {case.kind for case in others} - {"skewed"} == ALL - {GIVEN}
    for case in others:
        discrete = not inputs_of(made, case)[1].is_floating_point()
        if not (discrete and case.kind in {"clustered", "skewed"}):
            assert kept(*inputs_of(made, case), inputs_of(made, given)[1]), case.kind
            assert not torch.equal(case.inputs[0], given.inputs[0])


def test_largest_values_become_neighbors_and_whole_numbers_skewed() -> None:
    """The values of a clustered draw are the same in another order, and a skewed one stays in its range."""
    inputs = "return [torch.rand(64, 256), torch.rand(64, 16).topk(2).indices, torch.randperm(64)]"
    source = SOURCE.replace("forward(self, x)", "forward(self, *x)").format(forward="return x[0] + 0", inputs=inputs)
    given, *others = cases_of(reference(source, checks=1))
    made = {case.kind: case.inputs for case in others}
    x, routes, order = made["clustered"]
    assert torch.equal(x.flatten().sort().values, given.inputs[0].flatten().sort().values)
    # The 16 largest values of all rows are in 16 columns, and the 8 largest of every second row in 8.
    for rows, count in ((x, 16), (x[1::2], 8)):
        columns = rows.topk(count).indices.flatten().bincount().topk(count).indices
        assert torch.equal(rows[:, columns].sort(descending=True).values, rows.topk(count).values)
    assert routes.unique(return_counts=True)[1].max() > 36
    assert torch.equal(order.sort().values, torch.arange(64))
    assert not torch.equal(order, given.inputs[2])
    x, routes, order = made["skewed"]
    assert torch.equal(x, given.inputs[0])
    assert ((order.roll(-1) - order) % 64 == 1).all()  # sorted, and rotated by any number
    assert routes.min() >= 0
    assert routes.max() < 16


def test_each_draw_visits_both_ends_of_its_range() -> None:
    inputs = "return [torch.rand(64, 8), torch.rand(64, 8)]"
    source = SOURCE.replace("forward(self, x)", "forward(self, x, y)").format(forward="return x + y", inputs=inputs)
    given, *cases = cases_of(reference(source, checks=1))
    made = [given.inputs, *(case.inputs for case in cases if case.kind.startswith("ends"))]
    for draws in zip(*made, strict=True):
        assert {round(float(draw.mean()) * 2) for draw in draws} == {0, 1, 2}


def test_other_dtypes_than_the_declared_stay() -> None:
    """float32 becomes the precision, float64 unless it is kept by the settings, and half and integers never."""
    source = """
import torch
class Model(torch.nn.Module):
    def __init__(self, size, scale):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))
        self.register_buffer("light", torch.ones(size).half())
        self.register_buffer("phase", torch.ones(size, dtype=torch.complex64))
    def forward(self, x, y, z, i):
        return self.weight, self.light, self.phase, x + 0, y + 0, z + 0, i + 0
def get_inputs():
    return [torch.ones(2), torch.ones(2).half(), torch.ones(2).double(), torch.ones(2).int()]
def get_init_inputs():
    return {"scale": [torch.ones(2)], "size": 2}
"""
    bf16, half, phase, double = torch.bfloat16, torch.float16, torch.complex64, torch.float64
    for keeps, last in ((False, bf16), (True, double)):
        made = reference(source, precision=Precision.BF16, keeps_float64=keeps, checks=1)
        made.answer(cases_of(made)[0])
        assert [spec.dtype for spec in made.form.output_specs] == [bf16, half, phase, bf16, half, last, torch.int32]


def test_get_inputs_that_was_not_written_for_other_numbers_is_no_fault() -> None:
    for failing in ("raise ValueError", "x = x[:1]", "x = x * float('inf')", "x = x > 0"):
        made = loaded("return x", f"x = torch.randn(16, 8)\n    if x.abs().max() > 50: {failing}\n    return [x]")
        found = kinds(made)
        assert "uniform" in found
        assert "scaled" not in found


@pytest.mark.parametrize(
    ("forward", "dropped"),
    [
        ("return torch.exp(x)", {"scaled"}),  # overflows
        ("return torch.log(x.abs())", {"integers"}),  # infinite at zero
        ("if x.abs().max() > 50: raise ValueError('too large')\nreturn x", {"scaled"}),
        ("return x if x.abs().max() < 50 else x[:1]", {"scaled"}),
        ("return torch.where(x.abs() > 50, x * float('nan'), x)", {"scaled"}),
        ("return x.argmax(1)", {"integers"}),  # ties
        ("return x.gather(1, x.flip(1).argmax(1, keepdim=True))", {"integers"}),  # ties decide which value
        ("return torch.sign(x)", {"integers"}),  # a step at zero
        ("return torch.nn.functional.dropout(x)", ALL - {GIVEN, *WITHIN}),  # other random numbers in float64
        ("return (x.long() % 3).float() + x", ALL - {GIVEN, "blocks", "clustered", "divided"}),  # values are indices
        ("return x.to(torch.float32) * torch.ones(8, dtype=torch.float32)", ALL - {GIVEN, *WITHIN}),
    ],
)
def test_a_variant_that_a_right_kernel_could_answer_otherwise_does_not_count(forward: str, dropped: set[str]) -> None:
    """Variants with exceptions, another structure, infinite values, ties or steps are dropped without blame."""
    found = kinds(loaded(forward, "return [torch.randn(256, 8)]"))  # with few rows, rounding might change no tie
    assert GIVEN in found
    assert not found & dropped


def test_a_model_that_float64_changes_has_no_exact_outputs() -> None:
    for forward in (
        "return torch.nn.functional.dropout(x)",
        "return x @ torch.eye(8, dtype=torch.float32)",  # no float64 in it
        "assert x.dtype is torch.float32\nreturn x",
        "self.n = getattr(self, 'n', 0) + 1\nreturn x * self.n if x.dtype is torch.float64 else x",
        "return x if x.dtype is torch.float32 else x[:1]",
        "return (x, x) if x.dtype is torch.float64 else x",
    ):
        made = loaded(forward)
        cases = cases_of(made)[:3]
        assert all(made.answer(case) for case in cases)
        assert cases[-1].exact is None, forward


def test_numbers_that_forward_makes_and_attributes_are_float64_too() -> None:
    forward = "self.k = getattr(self, 'k', torch.full((8, 8), 0.1, dtype=x.dtype))\nreturn x @ self.k + torch.ones(8)"
    made = loaded(forward)
    [first, *_] = cases_of(made)
    made.answer(first)
    assert first.exact is not None
    assert torch.get_default_dtype() is torch.float32


def test_tensors_of_16_bits_have_variants() -> None:
    """They count by the outputs' rounding error, also if the evaluation is in fp32. One kind has no ties."""
    inputs = "return [torch.randn(64, 128).half()]"
    assert kinds(loaded("return torch.nn.functional.layer_norm(x, x.shape[-1:])", inputs)) > {
        GIVEN,
        "divided",
        "scaled",
    }
    assert "divided" in kinds(loaded("return torch.nn.functional.one_hot(x.argmax(-1), 128).to(x.dtype)", inputs))


def test_a_variant_that_a_single_rounding_fails_does_not_count() -> None:
    """In 16 bits the answer to some inputs is nearly constant, so roundings alone vary as much."""
    made = loaded("return x.logsumexp(0)", "return [torch.randn(64, 128).bfloat16()]")
    for case in answered(made):
        assert fault_of(case.inputs[0].double().logsumexp(0).bfloat16(), case, made.settings) is None


def test_exact_answers_and_variants_have_bounds() -> None:
    """Without time or memory for float64, there are only variants within the range. Large inputs get one more."""
    assert kinds(bounded(exact_s=0.0)) == kinds(bounded(host_bytes=0)) == {GIVEN, *WITHIN}
    assert kinds(bounded(varied_bytes=100, exact_s=0.0)) == {GIVEN, *WITHIN}
    assert "larger" not in {case.kind for case in cases_of(bounded(varied_bytes=100, host_bytes=0))}
    assert kinds(bounded(varied_bytes=100, larger_s=0.0)) == {GIVEN, *WITHIN, "larger"}


@pytest.mark.parametrize(("seconds", "expected"), [(0.1, len(ALL)), (0.5, 6), (1.9, 3), (7.0, 0)])
def test_a_slow_reference_has_few_variants_chosen_at_random(
    seconds: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of variants, with one region, follows from the CPU time of the reference's process alone."""
    taken = ReferenceProxy.taken
    monkeypatch.setattr(ReferenceProxy, "taken", lambda self: replace(taken(self), call_s=seconds))
    made = loaded("return x * 2", bounds=replace(PATIENT, quick_s=0.05))
    cases = cases_of(made)
    assert sum(case.kind != GIVEN for case in cases) + made.wants_region == expected
    assert ("scaled" in {case.kind for case in cases}) == (seconds < 1)
    assert all(made.answer(case) for case in cases)
    assert ("too slow" in made.unvaried) == (not expected)


@pytest.mark.parametrize(
    ("inputs", "settings", "reason"),
    [
        (RANDN, {"comparison": Comparison.KERNELBENCH}, "KernelBench's comparison"),
        (RANDN, {"tolerance": Tolerance(atol=1e-3, rtol=0)}, "own tolerance"),
        ("return [torch.ones(16, 8)]", {}, "draws no numbers that can be changed"),
        (f"return [torch.softmax({NUMPY}, 1)]", {}, "draws no numbers that can be changed"),
    ],
)
def test_the_reason_for_no_variant_is_known(inputs: str, settings: dict[str, Any], reason: str) -> None:
    made = loaded("return x * 2", inputs, **settings)
    assert kinds(made) == {GIVEN}
    assert reason in made.unvaried


def test_an_unstable_answer_without_float64_does_not_count() -> None:
    """The reference's own answer to nudged inputs drops variants on which a right kernel could answer otherwise."""
    exact_s = {"bounds": replace(PATIENT, exact_s=0.0)}
    forward = "return (x - x.mean(1, True)) / (x.std(1, keepdim=True) + 1e-12)"
    assert not kinds(loaded(forward, "return [2 + torch.rand(64, 8)]", **exact_s)) & {"sparse", "blocks"}


@pytest.mark.parametrize("inputs", ["torch.rand(512, 1024)", "torch.randn(512, 1024)", "torch.rand(512, 1024) * 4 - 3"])
@pytest.mark.parametrize(
    "part", [slice(0, None, 64), slice(0, 256), slice(256, None)], ids=["strided", "first", "last"]
)
def test_an_answer_from_a_sample_is_wrong_on_them(inputs: str, part: slice) -> None:
    """Each sample of the rows fails on a variant. A strided sample fails on the variant with few values."""
    made = reference(
        SOURCE.format(forward="return x.square().mean().sqrt()", inputs=f"return [{inputs}]"),
        bounds=replace(PATIENT, varied_bytes=100),
    )
    varied = [case for case in answered(made) if case.kind != GIVEN]
    assert [case.kind for case in varied] == ["sparse", "few", "blocks", "clustered", "divided", "larger"]
    low, high = made.case.inputs[0].aminmax() if made.case else (0, 0)
    assert all(bool(((case.inputs[0] >= low - 0.1) & (case.inputs[0] <= high + 0.1)).all()) for case in varied[:-1])
    faults = [fault_of(case.inputs[0][part].square().mean().sqrt(), case, made.settings) for case in varied]
    assert any(faults)
    assert faults[1] or not part.step or inputs.endswith("3")  # exempt: the other values are far from zero
    assert not any(
        fault_of(case.inputs[0].double().square().mean().sqrt().float(), case, made.settings) for case in varied
    )


@pytest.mark.parametrize("inputs", DRAWN)
def test_values_follow_from_the_seed_alone(inputs: str) -> None:
    """Each case has new values, and the same seed draws the same values again."""
    drawn: list[torch.Tensor] = []
    for _ in range(2):
        random.seed(1)
        numpy.random.seed(1)
        torch.manual_seed(1)
        made = loaded("return x", inputs)
        cases = [*cases_of(made)[:3], *(made.cache.fresh() for _ in range(3))]
        assert all(case.kind == GIVEN for case in cases)
        for i, one in enumerate(cases):
            assert not any(torch.equal(one.inputs[0], other.inputs[0]) for other in cases[:i])
        assert len({case.seed for case in cases}) == len(cases)
        again = made.cache.again(cases[0].drawn, cases[0].seed)
        made.answer(again)
        made.confirm(cases[0])
        drawn += [cases[0].inputs[0], again.inputs[0]]
    assert torch.equal(*drawn[:2])
    assert not torch.equal(drawn[0], drawn[2])


def test_outputs_that_are_inputs_are_told() -> None:
    source = SOURCE.replace("forward(self, x)", "forward(self, x, y)")
    for forward, expected in (
        ("return x", (0,)),
        ("return x.T[1:], y + 1, y", (0, None, 1)),
        ("return x.clone()", (None,)),
        ("return x.relu_(), x.sum()", (0, None, 0)),  # The changed input follows.
        ("return self.layer.weight, y.view(-1)", (None, 1)),
        ("return x[:0], x[:0].clone()", (None, None)),
    ):
        inputs = "return [torch.randn(4, 8), torch.randn(8, 8)]"
        made = reference(source.format(forward=forward, inputs=inputs), checks=1)
        assert made.form.output_aliases == ()
        made.answer(cases_of(made)[0])
        assert made.form.output_aliases == expected


def test_a_reference_that_does_not_depend_on_its_inputs_is_told() -> None:
    """An answer that ignores the inputs is a label and not a fault, because a kernel can also return a constant."""
    for forward, constant in (
        ("return x", []),
        ("return torch.ones(4, 8)", [0]),
        ("return torch.softmax(x, 1).sum(1)", [0]),
        ("return x * 1e-9", []),
        ("return x * 1e-9, self.layer.weight.T @ self.layer.weight", [1]),
        ("return torch.nn.functional.layer_norm(x, (8,)).mean(1), x.argmax(1) * 0", [0, 1]),
    ):
        for quick_s in (1.0, 0.0):  # with and without float64 answers
            made = loaded(forward, bounds=replace(PATIENT, quick_s=quick_s))
            assert made.constant_outputs == []
            answered(made)
            assert made.constant_outputs == constant, (forward, quick_s)


def fault_of(out: torch.Tensor, case: Case, settings: Settings) -> EvaluationEnded | None:
    try:
        compare.check_values([out], case, settings)
    except EvaluationEnded as ended:
        return ended
    return None


RIGHT_KERNELS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "return torch.nn.functional.gelu(self.layer(x))": lambda x, w, b: torch.nn.functional.gelu(x @ w.T + b),
    "return torch.softmax(self.layer(x), -1)": lambda x, w, b: (
        (y := torch.exp((z := x @ w.T + b) - z.amax(-1, True))) / y.sum(-1, keepdim=True)
    ),
    "return torch.nn.functional.layer_norm(x, (8,))": lambda x, w, b: (
        (x - x.mean(-1, True)) * torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5)
    ),
    "return self.layer(x).sum()": lambda x, w, b: (x.sum(0) @ w.T + 16 * b).sum(),
    "return x.max(1).values": lambda x, w, b: x.sort(1).values[:, -1],
    "return torch.logsumexp(x, 1)": lambda x, w, b: (m := x.amax(1)) + (x - m[:, None]).exp().sum(1).log(),
    "return torch.nn.functional.normalize(x)": lambda x, w, b: x / x.square().sum(1, True).sqrt(),
    "return torch.cumsum(x, 1)": lambda x, w, b: x @ torch.ones(8, 8, dtype=x.dtype).triu(),
    "return torch.tanh(x) * torch.sigmoid(x)": lambda x, w, b: x.tanh() / (1 + (-x).exp()),
    "return x.var(1)": lambda x, w, b: (x - x.mean(1, True)).square().sum(1) / 7,
}


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("forward", list(RIGHT_KERNELS))
@pytest.mark.parametrize("inputs", [RANDN, "return [torch.rand(16, 8)]", "return [torch.rand(16, 8) * 10 + 1]"])
def test_right_kernels_are_right_on_every_variant(forward: str, precision: Precision, inputs: str) -> None:
    """Kernels with other formulas, computed in fp32 and rounded once, pass on every variant."""
    made = loaded(forward, inputs, precision=precision, seed=0)
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8).to(DTYPES[precision]).float()
    for case in answered(made):
        x = case.inputs[0].float()
        out = RIGHT_KERNELS[forward](x, layer.weight, layer.bias).to(case.outputs[0].dtype)
        compare.check_values([out.detach()], case, made.settings)


def test_an_answer_that_is_near_zero_by_chance_costs_no_exact_ones() -> None:
    """Exact answers are kept if answers are mostly rounding errors. Without them, a correct kernel was refused."""
    near_zero = 0
    for _ in range(10):
        made = loaded("return (x + 3e6) - 3e6", "return [100 * torch.randn(1)]", checks=8)
        given = [case for case in answered(made) if case.kind == GIVEN]
        assert len(given) == 8
        for case in given:
            assert case.exact is not None
            apart = abs(case.outputs[0].item() - case.exact[0].item())
            near_zero += apart > 3e-3 * abs(case.exact[0].item())
    assert near_zero


@pytest.mark.parametrize("outputs", ["y", "(x * x * factor, y)"])
@pytest.mark.parametrize("varied_bytes", [0, 256 << 20])
def test_no_exact_answer_of_another_model_excuses_a_kernel_on_hidden_inputs(outputs: str, varied_bytes: int) -> None:
    forward = f"factor = 3 if x.dtype is torch.float64 else 2\ny = (x * x).sum() * factor\nreturn {outputs}"
    source = SOURCE.format(forward=textwrap.indent(forward, " " * 8).strip(), inputs="return [torch.randn(64, 64)]")
    made = reference(source, bounds=replace(PATIENT, varied_bytes=varied_bytes))
    cases = answered(made)
    assert varied_bytes or {case.kind for case in cases} > {GIVEN}
    for case in cases:
        assert case.exact is None
        for off in (1.2, 2.0):
            with pytest.raises(EvaluationEnded):
                compare.check_values([off * output for output in case.outputs], case, made.settings)


def test_what_was_not_told_before_all_was_let_go_of_is_not_known_after() -> None:
    """Exact answers of another model are dropped, also after the cases were released to free memory."""
    source = SOURCE.format(
        forward="return (x * x).sum() * (3 if x.dtype is torch.float64 else 2)", inputs="return [torch.randn(64, 64)]"
    )
    made = reference(source, bounds=replace(PATIENT, varied_bytes=0))
    first = first_of(made)
    made.cache.clear()
    hidden = [case for case in made.answer(*made.more_cases(first)[made.settings.checks - 1 :]) if case.kind != GIVEN]
    assert hidden
    assert all(case.exact is None for case in hidden)


def sinkhorn(x: torch.Tensor, times: int) -> torch.Tensor:
    y = x.float().softmax(-1)
    for _ in range(times):
        y = y / y.sum(0)
        y = y / y.sum(1)[:, None]
    return y


NARROW_KERNELS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "return torch.softmax(x, -1)": lambda x: x.exp() / x.exp().sum(-1, keepdim=True),  # overflows when scaled
    "return torch.nn.functional.relu6(x) + x": lambda x: x.relu() + x,  # right as long as values stay small
    "return x - x.mean()": lambda x: x - x[0].mean(),  # the mean of normal values is near zero
    "return torch.clamp(x, -6, 6)": lambda x: x,
    f"{inspect.getsource(sinkhorn)}\nreturn sinkhorn(x, 20)": lambda x: sinkhorn(
        x, 8
    ),  # converges sooner on usual inputs
}


@pytest.mark.parametrize("varied_bytes", [256 << 20, 100])
@pytest.mark.parametrize("forward", list(NARROW_KERNELS))
def test_kernels_that_are_right_on_the_given_distribution_only_are_found(forward: str, varied_bytes: int) -> None:
    """The variants detect these kernels, also with large inputs, and the message names the variant."""
    kernel = NARROW_KERNELS[forward]
    made = loaded(forward, "return [torch.randn(64, 1024)]", bounds=replace(PATIENT, varied_bytes=varied_bytes))
    cases = answered(made)
    assert len(cases) > 3
    faults = {case.kind: fault_of(kernel(case.inputs[0]), case, made.settings) for case in cases}
    found = {kind: fault for kind, fault in faults.items() if fault is not None}
    assert found.keys() & {*ALL, "larger"} - {GIVEN}
    for kind, fault in found.items():
        assert fault.outcome.facts.kind == kind
        assert (kind in fault.outcome.message) == (kind != GIVEN)


THRESHOLD = "return torch.where(x.abs() > 1.5, x / 2, x)"


@pytest.mark.parametrize("bounds", [PATIENT, replace(PATIENT, varied_bytes=100)])
def test_larger_inputs_are_not_near_a_threshold_by_chance(bounds: Bounds) -> None:
    """In 16 bits, one of many different values would be near any threshold."""
    kind = "scaled" if bounds is PATIENT else "larger"
    for dtype in (torch.float32, torch.bfloat16):
        made = loaded(THRESHOLD, f"return [torch.randn(512, 1024, dtype={dtype})]", bounds=bounds)
        [case] = [case for case in answered(made) if case.kind == kind]
        assert len(case.inputs[0].unique()) <= 80
        assert fault_of(case.inputs[0], case, made.settings) is not None


def test_a_variant_that_is_confirmed_is_answered_whatever_time_float64_has_left() -> None:
    """The kernel might use the device during confirmation, so the time limit of float64 must not drop the case."""
    made = loaded("return torch.nn.functional.gelu(self.layer(x))")
    [case] = [case for case in answered(made) if case.kind == "uniform"]
    made.oracle.left_s = 0.0
    made.confirm(case)
    assert case.outputs
    assert made.answer(case) == [case]


LARGE = "return [torch.randn(10 << 20)]"


def test_cases_that_take_much_together_are_held_one_at_a_time() -> None:
    """Each case replaces the one before, and a case that is drawn again has the same bits."""
    made = loaded("return x * 2", LARGE, checks=3)
    first = first_of(made)
    assert not made.cache.is_roomy
    cases = made.more_cases(first)
    assert all(case.slot is None for case in cases)
    assert any(case.kind == "larger" for case in cases)
    sums = [checksum(first.inputs[0]), checksum(first.outputs[0])]
    other = made.cache.fresh()
    assert (len(made.cache._held), first.slot, first.inputs, first.outputs) == (1, None, [], [])
    assert checksum(other.inputs[0]) != sums[0]
    made.answer(other)
    assert torch.equal(other.outputs[0], other.inputs[0] * 2)
    made.answer(first)
    assert len(made.cache._held) == 1
    assert [checksum(first.inputs[0]), checksum(first.outputs[0])] == sums


def test_a_long_forward_on_large_inputs_has_no_larger_ones() -> None:
    assert "larger" not in kinds(loaded("return x * 2", LARGE, bounds=replace(PATIENT, larger_s=0.0)))


def test_inputs_that_differ_under_one_seed_are_the_problem_s_fault() -> None:
    """Inputs without a seeded generator cannot be drawn again, which ends the evaluation as an invalid problem."""
    for forward in ("return x", "return torch.zeros(4)"):
        made = loaded(forward, "import os; return [torch.tensor(list(os.urandom(64))).float()]")
        first = first_of(made)
        with pytest.raises(EvaluationEnded, match=r"invalid_problem.*the same values.*under the same seeds"):
            made.confirm(first)


@pytest.mark.parametrize(
    "forward",
    [
        "return x + torch.get_num_threads()",
        "return torch.empty(64, dtype=torch.int64)",
        "self.n = getattr(self, 'n', 0) + 1; return x + min(self.n, 2)",
    ],
    ids=["threads", "memory", "calls"],
)
def test_a_reference_that_disagrees_with_itself_is_the_problem_s_fault(forward: str) -> None:
    """An answer that depends on threads, on unwritten memory or on earlier calls ends as an invalid problem."""
    with pytest.raises(EvaluationEnded, match=r"invalid_problem.*answers to one input differ"):
        first_of(loaded(forward))


@pytest.mark.parametrize(
    ("forward", "effects"),
    [
        ("x.mul_(2)\nreturn x + 0", [0]),
        ("self.n = getattr(self, 'n', 0) + 1\nreturn (x.mul_(2) if self.n > 1 else x * 2) + 0", []),
    ],
    ids=["always", "from the second call on"],
)
def test_a_reference_that_changes_its_inputs_gets_fresh_ones(forward: str, effects: list[int]) -> None:
    """The answers stay correct, and the judge's own copies of the inputs do not change.

    If the first call changes an input, its new values are a part of each answer.
    """
    made = loaded(forward)
    cases = cases_of(made)
    drawn = [case.inputs[0].clone() for case in cases]
    made.answer(*cases)
    made.answer(*(others := [made.cache.another() for _ in range(3)]))
    assert made.form.mutated == effects
    for case, before in zip(cases, drawn, strict=True):
        if case.kind == GIVEN:
            assert torch.equal(case.inputs[0], before)
            assert all(torch.equal(output, before * 2) for output in case.outputs)
            made.confirm(case)
    for case in others:
        assert torch.equal(case.outputs[0], case.inputs[0] * 2)


def test_inputs_that_are_changed_behind_torch_s_back_are_noticed() -> None:
    """A change by ``.data``, a Triton kernel or a library is detected."""
    made = loaded("x.data.mul_(2)\nreturn x + 0")
    first = first_of(made)
    assert made.form.mutated
    made.confirm(first)


@pytest.mark.parametrize("arena_bytes", [0, 2048, 1 << 20])
def test_an_arena_changes_nothing_but_where_things_lie(arena_bytes: int) -> None:
    forward, inputs = "return self.layer(x.t()), x[:, :4], x", "return [torch.randn(16, 8).t()]"
    source = SOURCE.format(forward=forward, inputs=inputs)
    plain = reference(source)
    made = reference(source, bounds=replace(PATIENT, arena_bytes=arena_bytes))
    cases = cases_of(made)
    assert made.proxy.arena_bytes <= arena_bytes
    assert bool(made.proxy.arena_bytes) == bool(arena_bytes)
    first_of(plain)
    for _ in range(10):
        mine = [case for case in cases if case.kind == GIVEN]
        beside = [plain.cache.again(case.drawn, case.seed) for case in mine]
        made.answer(*mine)
        plain.answer(*beside)
        for one, other in zip(mine, beside, strict=True):
            for a, b in zip([*one.inputs, *one.outputs], [*other.inputs, *other.outputs], strict=True):
                assert a.stride() == b.stride()
                assert torch.equal(a, b)
            assert one.outputs[2].data_ptr() != one.outputs[0].data_ptr()
        plain.cache.drop(beside)
        made.cache.drop(cases)
        cases = [made.cache.again(case.drawn, case.seed) for case in mine]
    made.cache.clear()
    assert made.proxy.arena_bytes == 0
