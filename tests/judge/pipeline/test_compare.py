"""The comparison of a kernel's outputs with the reference's."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import subprocess
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch

from kqueue.categories import Category
from kqueue.contract import Comparison, Precision, Settings, Tolerance
from kqueue.evidence import ErrorFigures, Facts
from kqueue.profiles import Protocol
from workers.judge.candidate.variants import rounded_otherwise
from workers.judge.channel.marks import mark
from workers.judge.channel.protocol import Answer, Reply
from workers.judge.channel.tensors import DTYPES, TensorSpec, describe, paths
from workers.judge.ending import EvaluationEnded
from workers.judge.pipeline import compare, evidence, likeness
from workers.judge.pipeline.cases import Case, Form
from workers.judge.pipeline.choices import selection
from workers.judge.pipeline.compare import check_each, check_values, need_no_excuse
from workers.judge.pipeline.evidence import merge_errors
from workers.judge.pipeline.exchange import check_form
from workers.judge.pipeline.grades import tolerance_for

ALLCLOSE = "kernelbench kernelbench-2025 robust-kbench robust-kbench-script flashinfer-bench-dtypes"
TIGHT = Tolerance(atol=1e-4, rtol=1e-4)


def fault(
    out: torch.Tensor,
    ref: torch.Tensor,
    exact: torch.Tensor | None = None,
    precision: Precision = Precision.FP32,
    kind: str = "given",
    again: torch.Tensor | None = None,
    **settings: Any,
) -> EvaluationEnded | None:
    case = Case(0, outputs=[ref], exact=[exact] if exact is not None else None, kind=kind)
    case.again = None if again is None else lambda: [again]
    try:
        check_values([out], case, Settings(precision=precision, **settings))
    except EvaluationEnded as ended:
        return ended
    return None


def facts_of(ended: EvaluationEnded | None, category: Category = Category.WRONG_VALUES) -> Facts:
    assert ended is not None
    assert ended.outcome.category is category
    return ended.outcome.facts


def figures(out: torch.Tensor, ref: torch.Tensor, exact: torch.Tensor | None = None, **settings: Any) -> ErrorFigures:
    case = Case(0, outputs=[ref], exact=[exact] if exact is not None else None)
    return check_values([out], case, Settings(**settings)).errors


def test_an_error_does_not_hold_the_outputs() -> None:
    """Outputs of a wrong call, which can be gigabytes, are free before the call is repeated."""
    out = torch.zeros(4)
    held = weakref.ref(out)
    with contextlib.suppress(EvaluationEnded):
        check_values([out], Case(0, outputs=[torch.ones(4)]), Settings())
    del out
    assert held() is None


def test_tolerances_follow_the_dtype() -> None:
    """The default is 1e-4 for fp32 and 1e-2 for fp16 and bf16. Integers must be equal, whatever the tolerance."""
    for dtype, expected in ((torch.float32, 1e-4), (torch.float16, 1e-2), (torch.bfloat16, 1e-2), (torch.int64, 0.0)):
        assert tolerance_for(dtype, Settings()) == Tolerance(atol=expected, rtol=expected)
    wide = Tolerance(atol=10.0, rtol=0.0)
    assert fault(torch.tensor([9.0]), torch.tensor([0.5]), tolerance=wide) is None
    facts_of(fault(torch.tensor([9]), torch.tensor([8]), tolerance=wide))


@pytest.mark.parametrize(
    ("out", "ref", "dtype", "passed"),
    [
        (1 + 5e-4, 1.0, torch.float32, "kernelbench-2025 robust-kbench-script flashinfer-bench"),
        (1 + 1.5e-5, 1.0, torch.float32, f"{ALLCLOSE} flashinfer-bench"),
        # Only torch.allclose adds both tolerances, and accepts infinities.
        (1 + 1.5e-2, 1.0, torch.float32, "kernelbench-2025"),
        (1 + 1.5e-2, 1.0, torch.bfloat16, "kernelbench-2025 flashinfer-bench-dtypes"),
        (math.inf, math.inf, torch.float32, ALLCLOSE),
    ],
)
def test_each_profile_has_its_project_s_rule(out: float, ref: float, dtype: torch.dtype, passed: str) -> None:
    """A verdict that no profile changes has the result of each, whether other numbers decide it or another pass."""
    tensors = [torch.full((64,), value, dtype=dtype) for value in (out, ref)]
    every = [name for name in Protocol if name is not Protocol.KERNELBENCH_EVAL]
    for tolerance in (None, Tolerance(atol=1.0, rtol=1.0)):
        settings = Settings(profiles=tuple(every), tolerance=tolerance)
        [result] = check_each([([tensors[0]], Case(0, outputs=[tensors[1]]))], settings)
        told = result.faults
        assert {name for name, why in told.items() if not why} == {*passed.split()}


def test_a_guide_s_share_of_fp8_values_is_enough() -> None:
    ref = torch.ones(100).to(torch.float8_e4m3fn)
    for wrong, passes in ((15, True), (16, False)):
        out = torch.where(torch.arange(100) < wrong, 4.0, 1.0).to(torch.float8_e4m3fn)
        ended = fault(out, ref, profiles=["flashinfer-bench-dtypes"])
        assert ended is not None
        assert (ended.faults["flashinfer-bench-dtypes"] == "") is passes


@pytest.mark.parametrize("by", ["settings", "problem"])
def test_each_output_can_have_its_own_tolerance(by: str) -> None:
    """Each entry of a list is for one output, None for the usual tolerance, and effects have the usual one too."""
    ref, listed = torch.randn(100), (None, Tolerance(atol=0.0, rtol=0.1))
    case, settings = Case(0, outputs=[ref, ref, ref]), Settings()
    if by == "settings":
        settings = Settings(tolerances=listed)
    else:
        case.tolerance = listed
    for wrong, factor in ((None, (1, 1.09, 1)), (1, (1, 1.2, 1)), (0, (1.09, 1, 1)), (2, (1, 1, 1.09))):
        [ended] = check_each([([ref * each for each in factor], case)], settings)
        assert (ended.outcome.facts.output if isinstance(ended, EvaluationEnded) else None) == wrong


def test_a_problem_s_tolerance_does_not_make_everything_right() -> None:
    wide = Tolerance(atol=1.0, rtol=0.1)
    ref = torch.linspace(-0.5, 0.5, 100)
    case = Case(0, outputs=[ref], tolerance=wide)
    assert check_values([ref * 1.09], case, Settings()).errors.kernelbench_correct is False
    for out, settings in ((ref * 1.2, Settings()), (ref * 0, Settings()), (ref * 1.09, Settings(tolerance=TIGHT))):
        with pytest.raises(EvaluationEnded, match="wrong_values"):
            check_values([out], case, settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_equal_values_pass_and_a_wrong_one_is_named(dtype: torch.dtype) -> None:
    ref = torch.arange(1, 13, dtype=torch.float32).to(dtype).reshape(3, 4)
    assert fault(ref.clone(), ref) is None
    out = ref.clone()
    out[1, 2] += 1
    first = facts_of(fault(out, ref)).first[0]
    assert first.index[:2] == (1, 2)
    assert (first.expected, first.got) == (7.0, 8.0)


def test_a_value_that_is_not_finite_passes_only_for_the_same() -> None:
    """A NaN or infinity for a finite value is `not_finite`, unless the kernel never wrote it. A masked -inf is -inf."""
    ref = torch.ones(4)
    for value in (float("nan"), float("inf"), float("-inf")):
        out = ref.clone()
        out[3] = value
        facts_of(fault(out, ref, tolerance=Tolerance(atol=1e30, rtol=1e30)), Category.NOT_FINITE)
    nan = torch.full((64,), -1.0, dtype=torch.bfloat16).log()  # It has ones alone, by vector instructions of a CPU.
    assert "never written" not in str(fault(nan, nan.nan_to_num(1.0)))
    mark(out[:2])
    facts_of(fault(out, ref), Category.NOT_FINITE)
    out[3] = 1.0
    assert "2 of 4 values were never written, the first at [0]" in str(fault(out, ref))
    facts_of(fault(out, ref))
    by_chance = torch.tensor([0xBF], dtype=torch.uint8).expand(8).contiguous().view(torch.bfloat16)
    assert "never written" not in str(fault(by_chance, torch.ones(4, dtype=torch.bfloat16)))
    ref = torch.tensor([1.0, float("-inf")])
    assert fault(ref.clone(), ref) is None
    for wrong in (1e38, float("inf"), float("nan")):
        assert fault(torch.tensor([1.0, wrong]), ref) is not None
    ended = fault(torch.tensor([1.0, -1e30]), ref, exact=ref.double())
    assert "1 of 2 values differ" in str(ended)
    assert "the first is -1e+30 instead of -inf" in str(ended)


def test_facts_name_the_cause_where_it_is_known() -> None:
    """A wrong answer counts the values that were never written, and says if indices differ among equal values only."""
    ref = torch.arange(1.0, 9.0)
    out = ref.clone()
    mark(out[6:])
    assert facts_of(fault(out, ref)).unwritten == 2
    assert facts_of(fault(ref + 1, ref)).unwritten is None
    case = Case(0, inputs=[torch.tensor([[1.0, 1.0, 2.0]])], outputs=[torch.tensor([[0, 2]])])
    for indices, tied in (([1, 2], True), ([2, 0], None), ([5, 2], None)):
        with pytest.raises(EvaluationEnded) as caught:
            check_values([torch.tensor([indices])], case, Settings())
        assert caught.value.outcome.facts.ties_only is tied


def test_tiny_large_scalar_and_empty_values_compare() -> None:
    """Zeros are wrong for tiny values, and two 64-bit integers that are equal as floats are different."""
    facts_of(fault(torch.zeros(8), torch.full((8,), 1e-6)))
    assert fault(torch.zeros(8), torch.zeros(8)) is None
    ref = torch.tensor([2**60])
    assert fault(ref + 1, ref) is not None
    assert fault(torch.tensor(3.0), torch.tensor(3.0)) is None
    assert fault(torch.empty(0), torch.empty(0)) is None
    assert facts_of(fault(torch.tensor(4.0), torch.tensor(3.0))).first[0].index == ()


@pytest.mark.parametrize(
    ("structure", "spec", "category"),
    [
        ("[Tensor]", TensorSpec(torch.float32, (2,), "cpu"), Category.WRONG_OUTPUT_STRUCTURE),
        ("Tensor", TensorSpec(torch.float64, (3,), "meta"), Category.WRONG_SHAPE),
        ("Tensor", TensorSpec(torch.float64, (2,), "meta"), Category.WRONG_DTYPE),
        ("Tensor", TensorSpec(None, (2,), "cpu"), Category.WRONG_DTYPE),
        ("Tensor", TensorSpec(torch.float32, (2,), "meta"), Category.WRONG_DEVICE),
    ],
)
def test_structure_goes_before_shape_before_dtype_before_device(
    structure: str, spec: TensorSpec, category: Category
) -> None:
    reply = Reply(Answer.MISMATCH, 1, structure=structure, tensors=(spec,))
    with pytest.raises(EvaluationEnded) as caught:
        check_form(reply, Form(structure="Tensor", paths=("",)), [torch.zeros(2)])
    assert caught.value.outcome.category is category


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass
class Result:
    a: Any
    b: Any = None


def test_structures_are_told_apart_and_forms_of_one_structure_are_not() -> None:

    class Fancy(torch.Tensor):
        pass

    t = torch.zeros(1)
    values = [t, (t,), [t], (t, t), {"a": t}, {"b": t}, {1: t}, {"1": t}, [(t,), t], (t, None), None, 1.0]
    values += [t.as_subclass(Fancy), t.to_sparse(), {t: t}]
    seen = [describe(value)[0] for value in values]
    assert len(set(seen)) == len(values)
    assert seen[:2] == ["Tensor", "(Tensor,)"]
    assert seen[-4:] == ["<float>", "<Fancy>", "<sparse_coo tensor>", "<dict with keys of the type Tensor>"]
    assert describe(Pair(t, [None]))[0] == "(Tensor, [None])"
    other = t + 1
    for alike in (OrderedDict(b=None, a=(t, {"y": other, "x": t})), Result((t, {"x": t, "y": other}))):
        structure, leaves = describe(alike)
        assert structure == "{'a': (Tensor, {'x': Tensor, 'y': Tensor}), 'b': None}"
        assert [leaf is other for leaf in leaves] == [False, False, True]
    assert paths(structure) == ("['a'][0]", "['a'][1]['x']", "['a'][1]['y']")
    deep: Any = t
    for _ in range(9):
        deep = [deep]
    for refused in (describe(deep)[0], "<float>", "Tensor, *Tensor", "f(Tensor)", "(" * 500, "{**Tensor}", ""):
        with pytest.raises(ValueError):
            paths(refused)


# ---- low-bit, unsigned and complex values -----------------------------------------------------------------------


def test_unsigned_integers_are_compared_exactly() -> None:
    for dtype in (torch.uint16, torch.uint32, torch.uint64):
        ref = torch.arange(1, 65).to(dtype)
        assert fault(ref.clone(), ref) is None
        wrong = torch.cat((torch.arange(1, 4), torch.tensor([5]), torch.arange(5, 65))).to(dtype)
        facts = facts_of(fault(wrong, ref))
        assert (facts.wrong, facts.first[0].expected, facts.first[0].got) == (1, 4, 5)
    large = torch.tensor([2**63 - 1]).view(torch.uint64)
    assert fault((large.view(torch.int64) - 1).view(torch.uint64), large) is not None


def low_bit(dtype: torch.dtype) -> list[torch.Tensor]:
    """Return values of a low-bit format, the values one step up, and unrelated ones."""
    if dtype is torch.float4_e2m1fn_x2:
        codes = torch.randint(0, 7, (2, 64, 32))
        codes[0, 0] = torch.arange(32) % 7
        ref, above = (part[0] | (part[1] << 4) for part in (codes, codes + 1))
        return [each.to(torch.uint8).view(dtype) for each in (ref, above, ref.flip(0))]
    values = torch.randn(64, 64).abs() * 8 + 1
    codes = values.to(dtype).view(torch.uint8)
    return [codes.view(dtype), (codes + 1).view(dtype), codes.flip(0).view(dtype)]


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.itemsize == 1 and d.is_floating_point], ids=str)
def test_low_bit_values_can_be_off_by_one_step(dtype: torch.dtype) -> None:
    ref, above, unrelated = low_bit(dtype)
    assert fault(ref.clone(), ref) is None
    half = ref.clone()
    half.view(torch.uint8)[::2] = above.view(torch.uint8)[::2]
    assert fault(half, ref) is None
    facts_of(fault(unrelated, ref))
    facts_of(fault(torch.ones(ref.shape).to(torch.uint8).view(dtype), ref))


def test_no_finite_value_is_excused_where_the_reference_is_infinite() -> None:
    ref = torch.randn(64)
    ref[5] = -torch.inf
    out = torch.where(ref.isfinite(), ref, -1e30)
    for other in ({"again": ref * (1 + 1e-7)}, {"exact": ref.double() * (1 + 1e-9)}):
        assert facts_of(fault(out, ref, **other)).wrong == 1


def test_a_matched_ratio_excuses_some_values_and_no_more() -> None:
    ref = torch.randn(100) + 3
    out = ref * torch.where(torch.arange(100) < 4, 1.5, 1.0)
    given = Tolerance(atol=0, rtol=0.1, matched_ratio=0.95)
    assert fault(out, ref, tolerance=given) is None
    ended = fault(ref * torch.where(torch.arange(100) < 6, 1.5, 1.0), ref, tolerance=given)
    assert facts_of(ended).wrong == 6
    assert "At least 0.95 of all must be within" in str(ended)
    facts_of(fault(out, ref, tolerance=Tolerance(atol=0, rtol=0.1)))


# ---- correct kernels: other orders, other roundings ------------------------------------------------------------

PRECISIONS = {torch.float32: Precision.FP32, torch.float16: Precision.FP16, torch.bfloat16: Precision.BF16}
Sum = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def in_chunks(a: torch.Tensor, b: torch.Tensor, size: int = 32) -> torch.Tensor:
    """Multiply like a Triton kernel, by blocks of the inner dimension with sums in fp32."""
    total = torch.zeros(a.shape[0], b.shape[1])
    for k in range(0, a.shape[1], size):
        total += a[:, k : k + size].float() @ b[k : k + size].float()
    return total


def one_by_one(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply like a naive kernel, with one thread for each output that adds the products in sequence."""
    total = torch.zeros(a.shape[0], b.shape[1])
    for k in range(a.shape[1]):
        total += a[:, k : k + 1].float() * b[k : k + 1].float()
    return total


def backwards(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply by blocks of four from the end, and add the sums as a tree."""
    parts = [in_chunks(a[:, part], b[part], 4) for part in torch.arange(a.shape[1]).flip(0).chunk(8)]
    return (parts[0] + parts[1]) + (parts[2] + parts[3]) + ((parts[4] + parts[5]) + (parts[6] + parts[7]))


def nudged(x: torch.Tensor) -> torch.Tensor:
    """Change each value by about a rounding error, as the reference's process does."""
    return rounded_otherwise(x, torch.finfo(x.dtype).eps)


def in_float64(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.double() @ b.double()).float()


@pytest.mark.parametrize("inner", [32, 8192])
@pytest.mark.parametrize("dtype", list(PRECISIONS))
@pytest.mark.parametrize("order", [in_chunks, one_by_one, backwards, in_float64])
def test_products_in_any_order_are_right(order: Sum, dtype: torch.dtype, inner: int) -> None:
    """A sum that cancels to near zero can have the rounding error of its terms."""
    torch.manual_seed(inner)
    for scale in (1.0, 100.0, 1e-3):
        a, b = (torch.randn(48, inner) * scale).to(dtype), torch.randn(inner, 48).to(dtype)
        ref, out = a @ b, order(a, b).to(dtype)
        for known in ({"exact": a.double() @ b.double()}, {"again": nudged(a) @ nudged(b)}):
            ended = fault(out, ref, precision=PRECISIONS[dtype], **known)
            assert ended is None, (scale, ended)


def test_long_sums_one_after_another_are_right() -> None:
    torch.manual_seed(1)
    for scale in (1.0, 100.0):
        x = torch.randn(64, 100_000) * scale
        out = torch.from_numpy(numpy.add.accumulate(x.numpy(), axis=1)[:, -1].copy())
        assert fault(out, x.sum(1), x.double().sum(1)) is None
        assert fault(out, x.sum(1), again=nudged(x).sum(1)) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_fused_kernel_may_be_more_precise_than_the_reference(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    x, v, w = torch.randn(64, 512), torch.randn(512, 512), torch.randn(512, 64)
    x, v, w = x.to(dtype), v.to(dtype) / 8, w.to(dtype)
    ref = torch.relu(x @ v) @ w
    exact = torch.relu(x.double() @ v.double()) @ w.double()
    out = (torch.relu(x.float() @ v.float()) @ w.float()).to(dtype)
    assert figures(out, ref, exact, precision=PRECISIONS[dtype]).error_ratio < 1


def test_what_is_nothing_but_rounding_errors_needs_not_be_the_same_ones() -> None:
    """A mean of normalised values is rounding noise, so any output with noise of that size is correct."""
    torch.manual_seed(3)
    x = torch.randn(256, 512)
    ref = (x - x.mean(1, keepdim=True)).mean(1)
    exact = (x.double() - x.double().mean(1, keepdim=True)).mean(1)
    other = (x - x.flip(1).mean(1, keepdim=True)).flip(1).mean(1)
    assert not torch.equal(other, ref)
    assert fault(other, ref, exact) is None
    assert fault(torch.zeros_like(ref), ref, exact) is None  # the exact answer is zero
    assert fault(other + 1e-4, ref, exact) is not None
    assert fault(other + 1e-4, ref) is not None


def test_values_that_are_nearly_constant_may_be_rounded_otherwise() -> None:
    torch.manual_seed(4)
    for dtype, precision in PRECISIONS.items():
        x = torch.randn(512, 128).to(dtype)
        ref = torch.softmax(x, 1).sum(1)
        again = torch.softmax(nudged(x), 1).sum(1)
        assert fault(torch.ones_like(ref), ref, None, precision, again=again) is None
        other = torch.softmax(x.flip(1), 1).flip(1).float().sum(1).to(dtype)
        assert fault(other, ref, None, precision, again=again) is None


# ---- wrong ones --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def product() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(6)
    a, b = torch.randn(256, 256), torch.randn(256, 256)
    return a, b, a @ b, a.double() @ b.double()


WRONG: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "zeros": lambda a, b, ref: torch.zeros_like(ref),
    "mean": lambda a, b, ref: torch.full_like(ref, float(ref.mean())),
    "mean of rows": lambda a, b, ref: ref.mean(1, keepdim=True).expand(256, 256).contiguous(),
    "first row for all": lambda a, b, ref: ref[:1].expand(256, 256).contiguous(),
    "identity": lambda a, b, ref: a.clone(),
    "shuffled": lambda a, b, ref: ref.flip(0),
    "transposed": lambda a, b, ref: ref.T.contiguous(),
    "scaled": lambda a, b, ref: ref * 1.001,
    "bf16": lambda a, b, ref: a.bfloat16().float() @ b.bfloat16().float(),
    "fp16": lambda a, b, ref: a.half().float() @ b.half().float(),
    "tf32": lambda a, b, ref: tf32(a) @ tf32(b),
    "bf16 output": lambda a, b, ref: ref.bfloat16().float(),
    "inner dimension cut": lambda a, b, ref: a[:, :255] @ b[:255],
    "one wrong": lambda a, b, ref: ref.index_put((torch.tensor(200), torch.tensor(3)), ref[0, 0]),
    "one unwritten": lambda a, b, ref: ref.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(float("nan"))),
    "nan laundered": lambda a, b, ref: torch.where(ref > 40, torch.nan, ref).nan_to_num(),
    "part of a tile": lambda a, b, ref: torch.cat((ref[:, :250], torch.zeros(256, 6)), 1),
    "noise": lambda a, b, ref: ref + 1e-3 * ref.std() * torch.randn_like(ref),
}


def tf32(x: torch.Tensor) -> torch.Tensor:
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_answers_to_a_product_fail(
    name: str, product: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
) -> None:
    a, b, ref, exact = product
    for scale in (1.0, 1e4):
        out = WRONG[name](a * scale, b, ref * scale)
        for known in (exact * scale, None):
            ended = fault(out, ref * scale, known)
            assert ended is not None
            assert ended.outcome.category in (Category.WRONG_VALUES, Category.NOT_FINITE)
            assert ended.outcome.facts.errors.strict_correct is False
            assert ended.outcome.facts.first


@pytest.mark.parametrize("error", [1.0, 0.01, 5e-4])
def test_one_wrong_value_in_a_million_is_found(error: float) -> None:
    torch.manual_seed(7)
    ref = torch.randn(1000, 1000)
    out = ref.clone()
    out[777, 333] += error * (1 + ref[777, 333].abs())
    for exact in (None, ref.double()):
        facts = facts_of(fault(out, ref, exact))
        assert (facts.wrong, facts.first[0].index) == (1, (777, 333))


def test_small_values_beside_large_ones_count() -> None:
    """Rounding errors in one half of an output do not excuse a missing other half."""
    torch.manual_seed(8)
    a, b = torch.randn(128, 512), torch.randn(512, 64)
    large, small = (a * 1e5) @ b, torch.randn(128, 64)
    ref = torch.cat((large, small), 1)
    again = torch.cat((nudged(a * 1e5) @ nudged(b), nudged(small)), 1)
    for exact in (torch.cat(((a.double() * 1e5) @ b.double(), small.double()), 1), None):
        assert fault(torch.cat((in_chunks(a * 1e5, b), small), 1), ref, exact, again=again) is None
        for cheat in (
            torch.zeros_like(small),
            small.flip(0),
            small * 1.05,
            torch.full_like(small, float(small.mean())),
        ):
            assert fault(torch.cat((large, cheat), 1), ref, exact, again=again) is not None


def test_tiny_references_want_their_own_values() -> None:
    torch.manual_seed(9)
    for value in (1e-6, 1e-3):
        ref = value * torch.randn(64, 64)
        assert fault(ref * (1 + 1e-6 * torch.randn_like(ref)), ref, ref.double()) is None
        for cheat in (torch.zeros_like(ref), torch.full_like(ref, value), ref * 0.9, ref.bfloat16().float().flip(0)):
            for exact in (ref.double(), None):
                assert fault(cheat, ref, exact) is not None
    # A right kernel's errors can be as large as a variant's tiny values, if the reference's own are.
    ref = 1e-6 * torch.randn(64, 64)
    assert fault(torch.zeros_like(ref), ref, kind="few", again=nudged(ref)) is not None
    assert fault(torch.zeros_like(ref), ref, kind="few") is None


def test_the_mean_of_nearly_constant_values_is_no_answer() -> None:
    torch.manual_seed(10)
    ref = 3 + 3e-5 * torch.randn(4096)
    ended = fault(torch.full_like(ref, float(ref.mean())), ref)
    assert facts_of(ended).errors.kernelbench_correct is True
    assert "mean" in str(ended)
    assert fault(ref + 2e-7, ref) is None


SUMS = torch.rand(256, 16384, generator=torch.Generator().manual_seed(25)).bfloat16()


@pytest.mark.parametrize(
    "out",
    [torch.full((256,), 8192.0), SUMS.double().sum(1).where(torch.arange(256) % 2 == 0, 8192.0)],
    ids=["all", "half"],
)
def test_a_constant_is_no_answer_to_long_sums_in_16_bits(out: torch.Tensor) -> None:
    """Their spread is less than a few rounding errors, and a right kernel follows it nevertheless.

    If inputs that the judge made bring all values within one, no kernel needs to follow.
    """
    ref, again = SUMS.float().sum(1).bfloat16(), nudged(SUMS).float().sum(1).bfloat16()
    for known in ({"exact": SUMS.double().sum(1)}, {"again": again}):
        assert fault(out.bfloat16(), ref, precision=Precision.BF16, **known) is not None
        right = SUMS.float().view(256, 64, 256).sum(2).bfloat16().float().sum(1).bfloat16()
        assert fault(right, ref, precision=Precision.BF16, **known) is None
    assert fault(out.bfloat16(), ref, SUMS.double().sum(1), kind="ends_0", precision=Precision.BF16) is None


def test_one_huge_value_hides_no_others() -> None:
    torch.manual_seed(26)
    ref = 1e-5 * torch.randn(256, 64)
    ref[3, 3] = 1e6
    large = ref > 1
    for known in ({"exact": ref.double()}, {"again": nudged(ref)}, {}):
        assert fault(nudged(ref), ref, **known) is None
        for factor in (0.0, 0.8):
            assert fault(torch.where(large, ref, ref * factor), ref, **known) is not None


def test_rows_of_another_scale_have_their_own_errors() -> None:
    """Small values in rows of large terms have large errors, which excuse nothing in other rows."""
    torch.manual_seed(27)
    a, b = torch.randn(128, 512), torch.randn(512, 64)
    a[:4] *= 1e6
    ref, again = a @ b, nudged(a) @ nudged(b)
    for known in ({"exact": a.double() @ b.double()}, {"again": again}):
        assert fault(one_by_one(a, b), ref, **known) is None
        assert fault(torch.cat((ref[:4], ref[4:] * 1.05)), ref, **known) is not None


def test_a_constant_along_one_dimension_is_no_answer() -> None:
    torch.manual_seed(28)
    ref = 100 + 10 * torch.randn(128, 1) + 2e-3 * torch.randn(128, 256)
    means = ref.mean(1, keepdim=True).expand(128, 256).contiguous()
    for known in ({"exact": ref.double()}, {"again": nudged(ref)}, {}):
        assert fault(nudged(ref), ref, **known) is None
        assert fault(means, ref, **known) is not None
        assert (
            fault(means.T.contiguous(), ref.T.contiguous(), **{k: v.T.contiguous() for k, v in known.items()})
            is not None
        )


def test_a_kernel_may_round_less_often_than_a_16_bit_reference() -> None:
    """Without exact answers too, whose part the answer to inputs that are rounded otherwise has."""
    torch.manual_seed(29)
    x, v = torch.randn(64, 512).bfloat16(), (torch.randn(512, 512) / 8).bfloat16()

    def model(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = torch.tanh(x @ v)
        return x

    ref, out, again = model(x, v), model(x.float(), v.float()).bfloat16(), model(nudged(x), v)
    assert fault(out, ref, precision=Precision.BF16) is not None
    assert fault(out, ref, precision=Precision.BF16, again=again) is None
    assert fault(out * 0.8, ref, precision=Precision.BF16, again=again) is not None


# ---- indices ---------------------------------------------------------------------------------------------------------


def judged(outs: list[torch.Tensor], refs: list[torch.Tensor], **case: Any) -> bool:
    found = check_each([(outs, Case(0, outputs=refs, **{"selects": "any"} | case))], Settings())[0]
    return not isinstance(found, EvaluationEnded)


def test_indices_may_differ_where_they_select_equal_values() -> None:
    torch.manual_seed(30)
    x = torch.randint(0, 6, (32, 64)).float()
    flipped = 63 - x.flip(1).topk(8).indices
    for k in (1, 8):
        ref, out = x.topk(k).indices, (63 - x.flip(1).sort(stable=True, descending=True).indices)[:, :k]
        assert judged([out], [ref], inputs=[x])
        assert judged([out.T.contiguous()], [ref.T.contiguous()], inputs=[x.T])
        assert judged([x.clone(), out], [x, ref])
        assert not judged([out], [ref], inputs=[torch.ones_like(x)])
        assert judged([out], [ref], inputs=[x.long()]) is (k > 1)
        assert not judged([(out + 1) % 64], [ref], inputs=[x])
        assert not judged([torch.full_like(out, 64)], [ref], inputs=[x])
    flat = x.flatten()
    assert judged([2047 - flat.flip(0).argsort(stable=True)], [flat.argsort(stable=True)], inputs=[x])
    assert not judged([torch.randperm(2048)], [flat.argsort()], inputs=[x, x.long()])
    repeated = flipped.clone()
    repeated[:, 1] = repeated[:, 0]
    assert not judged([repeated], [x.topk(8).indices], inputs=[x])
    least = x.argmin(1)
    assert judged([63 - x.flip(1).argmin(1)], [least], inputs=[x])
    assert not judged([x.argmax(1)], [least], inputs=[x])
    assert judged([x.median(1).indices], [63 - x.flip(1).median(1).indices], inputs=[x])


@pytest.mark.parametrize(
    ("operation", "selects"),
    [
        ("x.argmax(1)", "first"),
        ("x.min(1).indices", "first"),
        ("x.argsort(dim=1, stable=True)", "first"),
        ("x.sort(dim=1, descending=True, stable = True)[1]", "first"),
        ("x.argsort(1)", "any"),
        ("x.topk(8).indices", "any"),
        ("x.median(1).indices", "any"),
    ],
)
def test_an_order_of_equal_values_that_torch_defines_is_kept(operation: str, selects: str) -> None:
    """Only equal values of an input count. Computed values can be equal by rounding."""
    assert selection(operation) == selects
    torch.manual_seed(33)
    x = torch.randint(0, 6, (32, 64)).float()
    ref, out = eval(operation, {"x": x}), 63 - eval(operation, {"x": x.flip(1)})
    assert judged([out], [ref], inputs=[x])
    assert judged([out], [ref], inputs=[x], selects=selects) is (selects == "any")
    assert judged([x.clone(), out], [x, ref], selects=selects)


def test_lengths_are_no_indices() -> None:
    lengths = torch.randint(8, 64, (128,), generator=torch.Generator().manual_seed(31))
    mask = (torch.arange(64) < lengths[:, None]).float()
    assert not judged([torch.zeros_like(lengths)], [lengths - 1], inputs=[mask])


def test_indices_into_computed_values_agree_with_the_kernel_s_own() -> None:
    torch.manual_seed(32)
    own = torch.randn(64, 32).bfloat16()
    own[:, 1] = own[:, 0] = 5.0
    ref = own.clone()
    ref[:, 0] = 4.9844  # a rounding less
    settings = Settings(precision=Precision.BF16)
    for mine, is_right in ((own.argmax(1), True), (own.argmin(1), False)):
        [found] = check_each([([own, mine], Case(0, outputs=[ref, ref.argmax(1)], selects="first"))], settings)
        assert isinstance(found, EvaluationEnded) is not is_right


def test_an_integer_may_be_the_exact_answer_s() -> None:
    """A choice between values that a 16-bit reference rounds to the same one can be the float64 answer's."""
    ref, exact = torch.tensor([[3, 7], [1, 2]]), torch.tensor([[7, 3], [1, 2]])
    assert judged([exact.clone()], [ref], exact=[exact])
    assert not judged([torch.tensor([[3, 3], [1, 2]])], [ref], exact=[exact])
    assert not judged([torch.tensor([[3, 7], [1, 5]])], [ref], exact=[exact])


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.int64])
def test_an_integer_may_be_another_answer_to_nearly_equal_inputs(dtype: torch.dtype) -> None:
    """A few integers can be on the other side of a step, where the reference's own answer steps to the same value."""
    ref = torch.arange(128).remainder(2).to(dtype)
    ended, two, all_of_it = ref.clone(), ref.clone(), 1 - ref.to(torch.int8)
    ended[3], two[3:5] = 0, 1 - ref[3:5].to(torch.int8)
    moved = [[ref], [ended]]
    found = check_values([ended], Case(0, outputs=[ref], moved=lambda: moved), Settings()).errors
    assert (found.strict_correct, found.kernelbench_correct, found.jumps) == (True, False, 1)
    assert not judged([ended], [ref], moved=lambda: [[ref]])
    assert not judged([two], [ref], moved=lambda: moved)
    assert not judged([all_of_it.to(dtype)], [ref], moved=lambda: [[all_of_it.to(dtype)]])
    first, last, x = torch.tensor([1]), torch.tensor([2]), torch.tensor([[1.0, 5.0, 5.0]])
    assert not judged([last], [first], inputs=[x], selects="first", moved=lambda: [[last]])


# ---- kinds of numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_values_are_compared_in_both_parts(dtype: torch.dtype) -> None:
    torch.manual_seed(12)
    ref = torch.randn(8, 8, dtype=dtype)
    exact = ref.to(torch.complex128)
    assert fault(ref * (1 + 1e-7), ref, exact) is None
    assert facts_of(fault(ref.conj().resolve_conj(), ref, exact)).first[0].index == (0, 0, 1)
    assert figures(ref.clone(), ref, exact).error_ratio <= 1


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool])
def test_whole_numbers_and_booleans_must_be_equal(dtype: torch.dtype) -> None:
    """A difference of one is wrong, whatever the size. KernelBench would accept it for large values."""
    ref = torch.arange(100).to(dtype)
    assert fault(ref.clone(), ref) is None
    out = ref.clone()
    out[99] = not out[99] if dtype is torch.bool else out[99] + 1
    assert fault(out, ref) is not None
    large = torch.tensor([10**6])
    assert fault(large + 1, large) is not None
    assert fault(large + 1, large, comparison=Comparison.KERNELBENCH) is None


def test_infinities_must_agree_and_do_not_hide_the_rest() -> None:
    torch.manual_seed(13)
    ref = torch.randn(64, 64).masked_fill(torch.ones(64, 64).triu(1).bool(), float("-inf"))
    assert fault(ref.clone(), ref) is None
    assert fault(ref.clone(), ref, ref.double()) is None
    assert fault(ref.nan_to_num(), ref) is not None
    assert fault(-ref, ref) is not None
    assert fault(torch.where(ref.isinf(), ref, 0.0), ref) is not None
    told = figures(ref.clone(), ref, ref.double())
    assert told.max_abs_error == told.max_rel_error == told.relative_norm == 0


# ---- figures and verdicts --------------------------------------------------------------------------------------------


def test_figures_tell_how_far_an_answer_was() -> None:
    ref = torch.tensor([1.0, 2.0, -4.0, 0.0])
    exact = ref.double() + torch.tensor([1e-6, 0.0, 0.0, 0.0])
    told = figures(ref + torch.tensor([4e-6, 0.0, 0.0, 0.0]), ref, exact).model_dump()
    expected = dict.fromkeys(("max_abs_error", "max_rel_error"), 4e-6) | {"relative_norm": 4e-6 / 21**0.5}
    verdicts = {"strict_correct": True, "kernelbench_correct": True, "precision_downgrade": False}
    expected |= verdicts | {"error_ratio": 3, "jumps": 0}
    assert told == pytest.approx(expected, rel=0.05)
    assert figures(ref.clone(), ref).error_ratio is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("with_exact", [True, False])
def test_finite_values_have_the_same_figures_in_fewer_passes(dtype: torch.dtype, with_exact: bool) -> None:
    """The figures are equal bit for bit, and values that are not finite trigger the full measurement."""
    torch.manual_seed(15)
    ref = torch.randn(4096).to(dtype)
    ref[:3] = 0
    out = ref * 1.01 + (torch.rand(4096) < 0.01)
    case = Case(0, outputs=[ref], exact=[ref.to(torch.complex128 if ref.is_complex() else torch.float64) * 1.001])
    case.exact = case.exact if with_exact else None
    judged = compare._Output.of(0, out.to(dtype), case, Settings())
    assert torch.equal(judged.measure(), judged.measure(all_finite=False))
    for bad in (float("nan"), float("inf")):
        for tensor in (judged.out, judged.ref):
            before, tensor[7] = tensor[7].clone(), bad
            assert not judged.measure().isfinite().all()
            tensor[7] = before


def test_figures_are_numbers_that_json_holds() -> None:
    ref = torch.tensor([1e-45, 0.0, -3e38, float("inf")])
    out = torch.tensor([3e38, 1.0, 3e38, float("nan")])
    errors = facts_of(fault(out, ref, ref.double())).errors
    numbers = [value for _, value in errors or () if isinstance(value, float)]
    assert numbers
    assert all(abs(number) < float("inf") for number in numbers)


def test_a_reference_of_low_precision_makes_no_downgrade() -> None:
    """A kernel that is as precise as the reference is not downgraded, for example if both use TF32."""
    torch.manual_seed(15)
    a, b = torch.randn(128, 512), torch.randn(512, 64)
    ref, exact = tf32(a) @ tf32(b), a.double() @ b.double()
    assert fault(in_chunks(a, b), ref, exact) is None
    assert figures(in_chunks(tf32(a), tf32(b)), ref, exact).precision_downgrade is False


def test_the_verdict_that_was_asked_for_decides_and_both_are_told() -> None:
    """KernelBench accepts zeros for tiny values and rejects cancellation, and the strict verdict does the opposite."""
    torch.manual_seed(16)
    tiny = torch.full((8,), 1e-6)
    assert fault(torch.zeros(8), tiny, comparison=Comparison.KERNELBENCH) is None
    told = figures(torch.zeros(8), tiny, comparison=Comparison.KERNELBENCH)
    assert (told.strict_correct, told.kernelbench_correct) == (False, True)
    a, b = torch.randn(256, 4096) * 100, torch.randn(4096, 256)
    ref, out = a @ b, one_by_one(a, b)
    assert not torch.allclose(out, ref, rtol=1e-4, atol=1e-4)
    exact = a.double() @ b.double()
    told = figures(out, ref, exact)
    assert (told.strict_correct, told.kernelbench_correct) == (True, False)
    facts = facts_of(fault(out, ref, exact, comparison=Comparison.KERNELBENCH))
    assert (facts.errors.strict_correct, facts.errors.kernelbench_correct) == (True, False)


def test_a_variant_has_no_kernelbench_verdict_and_is_named() -> None:
    ref = torch.ones(8)
    ended = fault(ref + 1, ref, kind="scaled")
    facts = facts_of(ended)
    assert (facts.kind, facts.errors.kernelbench_correct) == ("scaled", None)
    assert "on scaled inputs" in str(ended)


def test_of_several_outputs_the_first_wrong_one_is_told_and_the_worst_figures() -> None:
    refs = [torch.ones(4), torch.empty(0), torch.arange(4), torch.ones(3)]
    outs = [refs[0] + 1e-6, refs[1], refs[2].clone(), refs[3] + 0.5]
    with pytest.raises(EvaluationEnded) as caught:
        check_values(outs, Case(0, outputs=refs), Settings())
    assert caught.value.outcome.facts.output == 3
    assert caught.value.outcome.facts.errors.max_abs_error == 0.5


def test_large_outputs_are_compared_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(18)
    ref = torch.randn(10, 10)
    out = ref + 1e-6 * torch.randn(10, 10)
    whole = figures(out, ref, ref.double() + 1e-7)
    monkeypatch.setattr(compare, "_CHUNK", 7)
    assert figures(out, ref, ref.double() + 1e-7).model_dump() == pytest.approx(whole.model_dump())
    out[9, 8] = 7
    out[3, 1] = float("inf")
    assert [place.index for place in facts_of(fault(out, ref), Category.NOT_FINITE).first] == [(3, 1)]
    out[3, 1] = 7
    assert [place.index for place in facts_of(fault(out, ref)).first] == [(3, 1), (9, 8)]


@pytest.mark.parametrize("shape", [(), (5,), (1000,), (3, 1), (40, 3), (2, 17, 33), (1, 100), (100, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64])
def test_wrong_values_are_mapped(shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(20)
    ref = torch.full(shape, 3, dtype=dtype)
    wrong = torch.rand(shape) < torch.linspace(0, 1, ref.numel()).reshape(shape) ** 3
    wrong.view(-1)[-1] = True
    parts = 2 if ref.is_complex() else 1
    columns = parts * (shape[-1] if shape else 1)
    rows = parts * ref.numel() // columns
    down, across = min(16, rows), min(16, columns)
    # A wrong complex value differs in its real part only.
    flat = wrong.reshape(-1, 1) & (torch.arange(parts) == 0)
    values: dict[tuple[int, int], list[bool]] = {}
    for place, is_wrong in enumerate(flat.reshape(-1).tolist()):
        row, column = divmod(place, columns)
        i = next(i for i in range(down) if row < (i + 1) * rows // down)
        j = next(j for j in range(across) if column < (j + 1) * columns // across)
        values.setdefault((i, j), []).append(is_wrong)
    digits = {
        cell: "0" if not any(all_of) else "9" if all(all_of) else str(1 + 8 * sum(all_of) // len(all_of))
        for cell, all_of in values.items()
    }
    for chunk in (7, 64, 1 << 24):
        monkeypatch.setattr(compare, "_CHUNK", chunk)
        found = facts_of(fault(torch.where(wrong, ref + 1, ref), ref)).map
        assert (found.rows, found.columns) == (rows, columns)
        assert found.shares == tuple("".join(digits[i, j] for j in range(across)) for i in range(down))


REF = torch.randn(64, 64, generator=torch.Generator().manual_seed(5))
REST = torch.zeros_like(REF).index_fill_(0, torch.arange(16, 64), 1)


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (REF * REST, "All wrong values are in [0:16, 0:64]. Every wrong value is 0."),
        (-REF, "The output is nearly the reference's times -1."),
        (REF + 0.5, "The output is nearly the reference's plus 0.5."),
        ((REF + 100).bfloat16().float(), "The output is nearly the reference's plus 100."),
        (REF.mT.contiguous(), "The output is nearly the reference's with its last two dimensions exchanged."),
        (REF.roll(-1, 1), "The output is nearly the reference's shifted by -1 along dimension 1."),
        (torch.cat((REF[:-1].flip(1), REF[:1].abs() * 1e9)), None),
        (
            REF - 1.4980392,
            "The output is nearly the reference's plus -1.498, which new memory holds here: set it first.",
        ),
        (REF + REF[0], "The output is nearly the reference's plus terms that depend on dimension 1 alone."),
        (
            REF * (2 + REF[:, :1]),
            "The output is nearly the reference's times factors that depend on dimension 0 alone.",
        ),
        (REF - REF.roll(1, 0).abs() - 1e-3, "Every wrong value is too small."),
        (REF + REF.roll(1, 0), None),
        (REF / REST, "All wrong values are in [0:16, 0:64]."),
    ],
)
def test_a_simple_relation_to_the_reference_is_told(out: torch.Tensor, words: str | None) -> None:
    ended = fault(out, REF)
    assert ended is not None
    assert ended.outcome.facts.likeness == words


def test_errors_that_no_nudge_shows_are_not_held_against_answers_to_nearly_equal_inputs() -> None:
    """Sums of nearly equal values are rounded alike after each nudge, so the reference's own error is unknown."""
    torch.manual_seed(23)
    ref = torch.rand(64, 4096) * 6e-5 - 9.7
    out = ref + 6e-5 * torch.randn(64, 1)
    facts_of(fault(out, ref, again=ref + 1e-9))
    assert fault(out, ref, kind="few", again=ref + 1e-9) is None


def test_a_wrong_output_that_cannot_be_mapped_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without memory for the error map does not hide the error."""

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(evidence, "_overlaps", full)
    monkeypatch.setattr(likeness, "_sentences", full)
    facts = facts_of(fault(torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.int64)))
    assert (facts.map, facts.likeness) == (None, None)


def test_coarse_values_in_a_wider_type_are_compared_as_coarse_ones() -> None:
    torch.manual_seed(19)
    x = torch.randn(64, 64).bfloat16()
    ref, out = torch.tanh(x).float(), torch.tanh(x.float())
    assert fault(out, ref, None, Precision.BF16) is None
    assert fault(out, ref, None, Precision.FP32) is not None


def test_where_tf32_is_allowed_a_kernel_may_be_more_precise_than_the_reference() -> None:
    torch.manual_seed(0)
    exact = torch.randn(64, 64, dtype=torch.float64)
    coarse = (exact * (1 + 5e-4 * torch.randn(64, 64))).float()
    told = figures(exact.float(), coarse, tf32=True)
    assert (told.strict_correct, told.precision_downgrade) == (True, False)
    with pytest.raises(EvaluationEnded):
        figures(exact.float(), coarse)


def test_what_needs_no_excuse_is_right_whatever_the_exact_answers_are() -> None:
    """Exact answers can only excuse errors, so outputs are compared without them first."""
    torch.manual_seed(0)
    truth = torch.randn(32, 32, dtype=torch.float64)
    excused = clear = 0
    for own, error in itertools.product((0.0, 1e-6, 1e-3, 0.3), repeat=2):
        for comparison in Comparison:
            settings = Settings(comparison=comparison)
            ref, out = ((truth * (1 + size * torch.randn(32, 32))).float() for size in (own, error))
            [is_clear] = need_no_excuse([([out], Case(0, outputs=[ref]))], settings)
            for exact in (None, truth, ref.double(), out.double(), 2 * truth, torch.full_like(truth, torch.nan)):
                case = Case(0, outputs=[ref], exact=None if exact is None else [exact])
                [found] = check_each([([out], case)], settings)
                is_right = not isinstance(found, EvaluationEnded)
                assert is_right or not is_clear
                excused += is_right and not is_clear
            clear += is_clear
    assert clear
    assert excused


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
def test_one_pass_on_a_gpu_finds_what_torch_s_operations_find_on_a_cpu() -> None:
    """Counts and maxima are equal to the bit, and sums differ only by their order."""
    script = Path(__file__).with_name("one_pass.py")
    told = [subprocess.check_output([sys.executable, str(script), device]) for device in ("cpu", "cuda")]
    on_cpu, on_gpu = map(json.loads, told)
    assert len(on_cpu) == len(on_gpu) == 64
    for name, expected in on_cpu.items():
        found = on_gpu[name]
        assert expected["wrong"] > 0, name
        for figure, value in expected.items():
            is_number = isinstance(value, float)
            assert found[figure] == (pytest.approx(value, rel=1e-9, nan_ok=True) if is_number else value), name


@pytest.mark.parametrize(("noise", "downgraded"), [(1e-7, True), (1e-4, False), (None, False)])
def test_a_lower_precision_shows_without_exact_answers(noise: float | None, downgraded: bool) -> None:
    """Without exact answers, the error ratio uses the reference's noise, if that is known."""
    torch.manual_seed(14)
    ref = torch.randn(4096)
    case = Case(0, outputs=[ref], noise=[noise] if noise else [])
    told = check_values([ref + 2e-5 * torch.randn(4096)], case, Settings()).errors
    assert told.precision_downgrade is downgraded
    assert told.error_ratio == (pytest.approx(2e-5 / noise, rel=0.1) if noise else None)
    assert check_values([ref.double().float()], case, Settings()).errors.precision_downgrade is False


def test_merged_figures_are_the_worst_of_each() -> None:
    """A figure that is None in one comparison is ignored there."""
    one = figures(torch.ones(2), torch.ones(2))
    two = one.model_copy(update={"max_abs_error": 2.0, "error_ratio": 3.0, "kernelbench_correct": None})
    three = one.model_copy(update={"precision_downgrade": True, "error_ratio": 2.0, "kernelbench_correct": False})
    assert merge_errors([one, two]) == two.model_copy(update={"kernelbench_correct": True})
    assert merge_errors([one, two, three]) == three.model_copy(update={"max_abs_error": 2.0, "error_ratio": 3.0})
    assert merge_errors([]) is None


def test_a_softmax_of_many_values_is_right_though_tiny() -> None:
    """Tiny values are compared relative to each other, and correct ones pass."""
    torch.manual_seed(5)
    x = torch.randn(2, 1 << 18)
    ref, exact = torch.softmax(x, 1), torch.softmax(x.double(), 1)
    out = x.exp() / x.exp().sum(1, keepdim=True)
    assert fault(out, ref) is None
    assert fault(out, ref, exact) is None
