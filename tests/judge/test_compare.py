"""The comparison: which outputs count as the reference's."""

from __future__ import annotations

import pytest
import torch

from kqueue.categories import Category
from kqueue.contract import Settings, Tolerance
from workers.channel.protocol import Answer, Reply, TensorSpec, describe
from workers.judge.compare import check_form, check_values, tolerance_for
from workers.judge.ending import EvaluationEnded
from workers.judge.problem import Case


def verdict(out: torch.Tensor, ref: torch.Tensor, tolerance: Tolerance | None = None) -> EvaluationEnded | None:
    """What comparing one output raises, if anything."""
    try:
        check_values([out], Case(0, [], [ref]), Settings(tolerance=tolerance))
    except EvaluationEnded as ended:
        return ended
    return None


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.float32, 1e-4), (torch.float16, 1e-2), (torch.bfloat16, 1e-2), (torch.int64, 0.0)]
)
def test_tolerances_follow_the_dtype(dtype: torch.dtype, expected: float) -> None:
    """1e-4 for fp32, 1e-2 for fp16 and bf16, equality for what is not floating."""
    assert tolerance_for(dtype, Settings()) == Tolerance(atol=expected, rtol=expected)


def test_an_evaluation_s_own_tolerance_holds_for_floats_only() -> None:
    """Integers must be equal whatever is asked for."""
    wide = Tolerance(atol=10.0, rtol=0.0)
    assert verdict(torch.tensor([9.0]), torch.tensor([0.5]), wide) is None
    ended = verdict(torch.tensor([9]), torch.tensor([8]), wide)
    assert ended is not None
    assert ended.outcome.category is Category.WRONG_VALUES


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_equal_values_pass_and_a_wrong_one_is_named(dtype: torch.dtype) -> None:
    """The first wrong place is told with what was expected and what was got."""
    ref = torch.arange(1, 13, dtype=torch.float32).to(dtype).reshape(3, 4)
    assert verdict(ref.clone(), ref) is None
    out = ref.clone()
    out[1, 2] += 1
    ended = verdict(out, ref)
    assert ended is not None
    assert ended.outcome.category is Category.WRONG_VALUES
    first = ended.outcome.facts["first"][0]
    assert first["index"][:2] == [1, 2]
    assert (first["expected"], first["got"]) == (7.0, 8.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_never_passes(value: float) -> None:
    """NaN and infinity where the reference is finite are `not_finite`, whatever the tolerance."""
    ref = torch.ones(4)
    out = ref.clone()
    out[3] = value
    ended = verdict(out, ref, Tolerance(atol=1e30, rtol=1e30))
    assert ended is not None
    assert ended.outcome.category is Category.NOT_FINITE


def test_an_infinite_reference_wants_the_same_infinity() -> None:
    """A masked row of -inf is answered by -inf, not by a large number nor by +inf."""
    ref = torch.tensor([1.0, float("-inf")])
    assert verdict(ref.clone(), ref) is None
    for wrong in (1e38, float("inf"), float("nan")):
        assert verdict(torch.tensor([1.0, wrong]), ref) is not None


def test_zeros_for_a_tiny_reference_do_not_pass() -> None:
    """Values within the tolerance of zero are not answered by doing nothing."""
    ref = torch.full((8,), 1e-6)
    ended = verdict(torch.zeros(8), ref)
    assert ended is not None
    assert ended.outcome.category is Category.WRONG_VALUES
    assert verdict(torch.zeros(8), torch.zeros(8)) is None


def test_large_integers_are_compared_exactly() -> None:
    """Two 64-bit integers that are one float apart are different."""
    ref = torch.tensor([2**60])
    assert verdict(ref + 1, ref) is not None


def test_scalars_and_empty_outputs_compare() -> None:
    """No dimension and no element are no reason to fail."""
    assert verdict(torch.tensor(3.0), torch.tensor(3.0)) is None
    assert verdict(torch.empty(0), torch.empty(0)) is None
    ended = verdict(torch.tensor(4.0), torch.tensor(3.0))
    assert ended is not None
    assert ended.outcome.facts["first"][0]["index"] == []


@pytest.mark.parametrize(
    ("structure", "spec", "category"),
    [
        ("[T]", TensorSpec(torch.float32, (2,), "cpu"), Category.WRONG_OUTPUT_STRUCTURE),
        ("T", TensorSpec(torch.float64, (3,), "meta"), Category.WRONG_SHAPE),
        ("T", TensorSpec(torch.float64, (2,), "meta"), Category.WRONG_DTYPE),
        ("T", TensorSpec(None, (2,), "cpu"), Category.WRONG_DTYPE),
        ("T", TensorSpec(torch.float32, (2,), "meta"), Category.WRONG_DEVICE),
    ],
)
def test_structure_goes_before_shape_before_dtype_before_device(
    structure: str, spec: TensorSpec, category: Category
) -> None:
    """Of several differences the first in that order is the category."""
    reply = Reply(Answer.MISMATCH, 1, structure=structure, tensors=(spec,))
    with pytest.raises(EvaluationEnded) as caught:
        check_form(reply, "T", [torch.zeros(2)])
    assert caught.value.outcome.category is category


def test_arrangements_are_told_apart() -> None:
    """Tuple, list, dict, subclass and nesting each look different."""

    class Fancy(torch.Tensor):
        pass

    t = torch.zeros(1)
    values = [t, (t,), [t], (t, t), {"a": t}, {"b": t}, [(t,), t], None, 1.0, t.as_subclass(Fancy)]
    seen = [describe(value)[0] for value in values]
    assert len(set(seen)) == len(values)
    assert seen[:2] == ["T", "(T)"]
