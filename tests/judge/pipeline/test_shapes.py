"""The outcome of a kernel over several shapes, from the outcomes for each."""

from __future__ import annotations

import math

import pytest

from kqueue.categories import Category
from kqueue.contract import Outcome, Phase
from kqueue.evidence import BaselineError, ErrorFigures, Evidence, Facts, Measurement, Provenance
from kqueue.feedback import shape_lines
from kqueue.shapes import Shape
from tests.samples import ended, measurement, passed
from workers.judge.pipeline.shapes import Judged, combine

SHAPES = [
    Shape(name="small"),
    Shape(name="large", weight=3.0),
    Shape(held_out=True).model_copy(update={"name": "held out 1"}),
]


def took(median_ms: float, error: float) -> Measurement:
    low_ms, high_ms = median_ms * (1 - error), median_ms * (1 + error)
    return measurement(median_ms).model_copy(update={"low_ms": low_ms, "high_ms": high_ms})


def right(runtime_ms: float, baseline_ms: float, **evidence: object) -> Outcome:
    facts = Evidence(checks=5, checks_asked=2, verified_calls=3, **evidence)
    return passed(runtime=took(runtime_ms, 0.03), baseline=took(baseline_ms, 0.04), evidence=facts, log="log")


def over(*outcomes: Outcome) -> Outcome:
    return combine(SHAPES, [Judged(shape, one, 0.5) for shape, one in zip(SHAPES, outcomes, strict=False)], on_gpu=True)


def test_the_speedup_is_the_weighted_geometric_mean() -> None:
    whole = over(right(1.0, 2.0), right(10.0, 5.0), right(0.1, 0.4))
    mean = (2.0 * 0.5**3 * 4.0) ** 0.2
    assert whole.speedup == pytest.approx(mean)
    assert whole.runtime_ms == pytest.approx((1.0 * 10.0**3 * 0.1) ** 0.2)
    # The interval of one shape is 5 %. Errors of the calls partly cancel out, the clock's in the same processes do not.
    assert whole.speedup_interval is not None
    assert 1 + 0.05 * math.sqrt(1 + 9 + 1) / 5 < whole.speedup_interval[1] / mean < 1.05
    long = over(*(right(1e6, 1e6) for _ in SHAPES)).speedup_interval
    clock = 0.02 * math.sqrt(2)
    assert long is not None
    assert long[1] == pytest.approx(1 + math.hypot(clock, math.sqrt((0.05**2 - clock**2) * (1 + 9 + 1)) / 5))
    known = whole.evidence.shapes
    assert known is not None
    assert [(row.name, row.speedup, row.checks, row.hidden_variants) for row in known.rows] == [
        ("small", 2.0, 5, 3), ("large", 0.5, 5, 3), ("held out 1", pytest.approx(4.0), 5, 3),
    ]  # fmt: skip
    assert (known.worst, known.worst_speedup, known.spread) == ("large", 0.5, pytest.approx(8.0))
    assert (whole.evidence.checks, whole.evidence.checks_asked, whole.evidence.verified_calls) == (15, 6, 9)
    assert (
        whole.message
        == "right on 15 input sets of 3 shapes (1 held out), 9 of the sets hidden variants, random each time"
    )
    words = "\n".join(shape_lines(whole.evidence))
    assert "Shape large: passed, 10 ms, reference 5 ms, speedup 0.50x (0.48x to 0.53x), weight 3." in words
    assert "The worst speedup is 0.50x (large), and the best is 8.00 times that." in words


def test_no_mean_where_a_shape_has_no_speedup() -> None:
    """A shape whose times are of two clocks has no speedup, so the kernel has none."""
    mixed = passed(runtime=measurement(1.0), baseline=measurement(2.0).model_copy(update={"basis": "gpu_clock"}))
    whole = over(right(1.0, 2.0), mixed, right(1.0, 3.0))
    assert (whole.runtime_ms, whole.baseline_ms, whole.speedup) == (pytest.approx(1.0), None, None)
    assert whole.evidence.shapes.worst == "small"
    untimed = over(*(passed(runtime=None, baseline=None) for _ in SHAPES))
    assert (untimed.runtime, untimed.evidence.shapes.spread) == (None, None)


def origin(own_share: float, name: str = "") -> Provenance:
    return Provenance(
        own_share=own_share, own=(name,), library=(), unclear_share=0, unclear=(), copies_share=0,
        decoy=own_share < 0.1, why=name, basis="",
    )  # fmt: skip


def test_a_decoy_for_one_shape_is_a_decoy() -> None:
    """The names of the GPU kernels that ran for a held-out shape are not shown."""
    whole, part, none = (right(1, 2, provenance=origin(share, "4097")) for share in (1, 0.5, 0))
    assert over(whole, none, part).evidence.provenance == origin(0, "4097")
    hidden = over(*(right(1, 2, provenance=origin(share, "own")) for share in (1, 0.5)), none).evidence.provenance
    assert hidden == origin(0.5, "own").model_copy(
        update={"decoy": True, "why": "the kernel is a decoy for held out 1"}
    )


def test_the_compiled_reference_has_a_mean_too() -> None:
    one, other = (right(1, 2, compiled_baseline=took(ms, 0.1)) for ms in (1, 16))
    mean = over(one, other, one).evidence.compiled_baseline
    assert isinstance(mean, Measurement)
    assert mean.median_ms == pytest.approx(16**0.6)
    failed = right(1, 2, compiled_baseline=BaselineError(error="no compiler"))
    assert over(one, failed, one).evidence.compiled_baseline == BaselineError(error="no compiler")
    assert over(one, other, failed).evidence.compiled_baseline == BaselineError(error="it failed for held out 1")


def test_the_failing_shape_is_named() -> None:
    whole = over(right(1.0, 2.0), ended(Category.WRONG_VALUES, message="output 0: 1 of 4", log="wrong"))
    assert (whole.category, whole.message) == (Category.WRONG_VALUES, "shape large: output 0: 1 of 4")
    assert (whole.facts.shape, whole.facts.wrong, whole.log, whole.runtime) == ("large", 1, "wrong", None)
    assert [row.category for row in whole.evidence.shapes.rows] == [Category.PASSED, Category.WRONG_VALUES, None]
    broken = ended(Category.COMPILE_ERROR, phase=Phase.LOAD)
    assert over(broken) == broken


@pytest.mark.parametrize("category", [category for category in Category if category is not Category.PASSED])
def test_only_the_result_of_a_held_out_shape_is_shown(category: Category) -> None:
    """Its message, facts and log could have its sizes, or whatever a kernel prints."""
    figures = ErrorFigures(
        max_abs_error=4097, max_rel_error=4097, relative_norm=4097, error_ratio=4097, precision_downgrade=False,
        strict_correct=False, kernelbench_correct=False,
    )  # fmt: skip
    failed = ended(
        category,
        message="of 4097 columns",
        log="4097",
        evidence=Evidence(output_bytes=4097, comparison=figures, provenance=origin(1, "4097")),
    )
    whole = over(right(1.0, 2.0), right(1.0, 2.0), failed)
    facts = Facts(shape="held out 1", withheld=True, instead_of=failed.facts.instead_of)
    assert (whole.category, whole.facts) == (category, facts)
    assert "4097" not in whole.model_dump_json()
    assert whole.message.startswith(f"shape held out 1: {category}")
    assert (whole.phase, whole.log) == (failed.phase, "log")
