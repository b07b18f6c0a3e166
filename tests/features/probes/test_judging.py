"""Drawn probes, and findings from their verdicts."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest

from kqueue.categories import Category
from kqueue.contract import Verdict
from kqueue.evidence import Measurement
from kqueue.features.probes import drawing
from kqueue.states import Finding, ProbeKind
from tests.samples import ended, measurement, passed

LANES = ("cpu", "gpu", "gpu.h200")


def verdict(category: Category = Category.PASSED, **times: Measurement | None) -> Verdict:
    outcome = passed(**times) if category is Category.PASSED else ended(category)
    now = datetime.now(UTC)
    fields: dict[str, Any] = {"submitted_at": now, "finished_at": now, "attempts": 1, "lane": "cpu"}
    fields |= {"backend": "torch", "environment": None, "problem_label": None, "kernel_label": None}
    fields |= {"written_by": "judge", "reused_from": None, "judged_at": None}
    return Verdict.load(outcome.model_dump() | fields | {"evaluation_id": uuid4()})


def finding(kind: ProbeKind, known: Verdict, duration_ms: float | None = None) -> Finding:
    return drawing.judge(known, kind=kind, duration_ms=duration_ms).finding


def taken(
    shortest_ms: float, median_ms: float = 25.0, basis: str = "cpu_clock", overhead_ms: float = 0.1
) -> Measurement:
    """Return a measurement with this shortest call without launch overhead, and this median."""
    changes = {"min_ms": shortest_ms, "median_ms": median_ms, "basis": basis, "overhead_ms": overhead_ms}
    return measurement(median_ms).model_copy(update=changes)


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("kind", ProbeKind)
def test_what_is_drawn_can_be_asked_for(lane: str, kind: ProbeKind) -> None:
    """Each probe is Python source, new each time, never reused, and of the requested kind."""
    drawn = [drawing.draw(lane, kind) for _ in range(30)]
    assert {probe.kind for probe in drawn} == {kind}
    for probe in drawn:
        compile(probe.request.problem, "problem", "exec")
        compile(probe.request.kernel, "kernel", "exec")
        for word in ("GIVEN", "ANSWER", "OUT", "FIRST", "SECOND", "BODY", "DURATION_", "ROWS", "OVER", "OFF", "KEPT"):
            assert word not in probe.request.problem + probe.request.kernel
    assert len({probe.request.kernel_hash for probe in drawn}) == len(drawn)
    assert len({probe.request.problem_hash for probe in drawn}) == len(drawn)
    assert not any(probe.request.reuse for probe in drawn)
    assert {probe.duration_ms is not None for probe in drawn} == {kind is ProbeKind.KNOWN_DURATION}


def test_all_kinds_and_ideas_are_drawn() -> None:
    drawn = [drawing.draw("cpu") for _ in range(600)]
    assert {probe.kind for probe in drawn} == set(ProbeKind)
    assert {probe.idea for probe in drawn if probe.kind is ProbeKind.CHEAT} == set(drawing._CHEATS)


@pytest.mark.parametrize(
    ("kind", "category", "shows"),
    [
        (ProbeKind.CHEAT, Category.PASSED, Finding.CHEAT_ACCEPTED),
        (ProbeKind.CHEAT, Category.WRONG_VALUES, Finding.AGREED),
        (ProbeKind.CHEAT, Category.RUNTIME_ERROR, Finding.CHEAT_MISTAKEN),
        (ProbeKind.HONEST, Category.PASSED, Finding.AGREED),
        (ProbeKind.HONEST, Category.WRONG_VALUES, Finding.HONEST_REFUSED),
        (ProbeKind.KNOWN_DURATION, Category.NONDETERMINISTIC, Finding.HONEST_REFUSED),
        *((kind, category, Finding.VOID) for kind in ProbeKind for category in (
            Category.WORKER_LOST, Category.JUDGE_ERROR, Category.GPU_UNHEALTHY, Category.TIMING_UNSTABLE,
            Category.TIMEOUT, Category.HOST_OUT_OF_MEMORY, Category.CANCELLED, Category.EXPIRED,
            Category.REFERENCE_ERROR,
        )),
    ],
)  # fmt: skip
def test_a_category_is_right_or_wrong_or_shows_nothing(kind: ProbeKind, category: Category, shows: Finding) -> None:
    """A failure of the fleet, a lack of memory or a cancellation is no finding against the judge."""
    assert finding(kind, verdict(category), 25.0 if kind is ProbeKind.KNOWN_DURATION else None) is shows


@pytest.mark.parametrize(
    ("shortest_ms", "overhead_ms", "reference_ms", "shows"),
    [
        (25.0, 0.1, 50.0, Finding.AGREED),
        (33.0, 0.1, 60.0, Finding.AGREED),  # a busy host
        (20.0, 6.0, 45.0, Finding.AGREED),  # a large launch overhead, which is subtracted
        (12.5, 0.1, 25.0, Finding.CLOCK_SHORT),
        (50.0, 0.1, 100.0, Finding.CLOCK_LONG),
        (25.0, 0.1, 100.0, Finding.CLOCK_UNEVEN),
        (25.0, 0.1, 25.0, Finding.CLOCK_UNEVEN),
    ],
)
def test_a_clock_of_a_cpu_has_wide_bounds(
    shortest_ms: float, overhead_ms: float, reference_ms: float, shows: Finding
) -> None:
    """Half and double times are findings, in one or both measurements, but not the times of a busy host."""
    times = {
        "runtime": taken(shortest_ms, overhead_ms=overhead_ms),
        "baseline": taken(reference_ms, overhead_ms=overhead_ms),
    }
    assert finding(ProbeKind.KNOWN_DURATION, verdict(**times), 25.0) is shows


@pytest.mark.parametrize(
    ("median_ms", "shows"),
    [
        (2.0, Finding.AGREED), (2.05, Finding.AGREED), (1.8, Finding.CLOCK_SHORT), (2.4, Finding.CLOCK_LONG),
        (4.0, Finding.CLOCK_LONG),
    ],
)  # fmt: skip
def test_a_clock_of_a_gpu_has_narrow_bounds(median_ms: float, shows: Finding) -> None:
    times = {"runtime": taken(median_ms, median_ms, "gpu_clock"), "baseline": taken(0.01, 0.01, "gpu_clock")}
    known = drawing.judge(verdict(**times), kind=ProbeKind.KNOWN_DURATION, duration_ms=2.0)
    assert known.finding is shows
    assert known.bias == pytest.approx(median_ms / 2.0 - 1)


def test_a_known_duration_kernel_without_a_time_is_wrong() -> None:
    """A judge that returns no times fails the probe."""
    assert finding(ProbeKind.KNOWN_DURATION, verdict(runtime=None, baseline=None), 25.0) is Finding.CLOCK_UNEVEN
