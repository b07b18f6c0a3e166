"""The plan of a GPU's memory: the sum fits on the GPU, and each process gets its share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.judge.pipeline import plan

_MIB, _GIB = 1 << 20, 1 << 30
#: Memory of an H200 in bytes, and memory that the CUDA contexts of three processes of a slot take.
_H200 = 140 * _GIB
_CONTEXTS = 3 * 640 * _MIB

totals = st.integers(8, 140).map(lambda gib: gib * _GIB)
places = st.integers(1, 32)
sizes = st.integers(0, 64 * _GIB)


def settled(inputs: int, outputs: int, weights: int, peak: int, *, total: int = _H200, siblings: int = 1) -> plan.Plan:
    """Return the plan of a problem that has answered, on a GPU with this number of slots."""
    return plan.settled(inputs, outputs, weights, peak, whole=plan.capacity(total, siblings), siblings=siblings)


@given(totals, places)
def test_contexts_of_all_places_fit_beside_what_may_be_booked(total: int, siblings: int) -> None:
    whole = plan.capacity(total, siblings)
    assert total - total // 3 <= whole < total
    assert whole + siblings * _CONTEXTS < total or whole == total - total // 3
    assert plan.capacity(total, siblings + 1) <= whole <= plan.capacity(total + 1, siblings)


@given(totals, places, st.data())
def test_small_problems_of_all_places_fit_together(total: int, siblings: int, data: st.DataObject) -> None:
    whole = plan.capacity(total, siblings)
    small = st.integers(0, min(64 * _MIB, whole // siblings // 100))
    inputs, outputs, weights, peak = (data.draw(small) for _ in range(4))
    assert siblings * plan.of_first_call(inputs, weights, whole=whole, siblings=siblings, alone=False).total <= whole
    assert siblings * settled(inputs, outputs, weights, peak, total=total, siblings=siblings).total <= whole


def test_each_part_of_a_problem_has_its_memory() -> None:
    made = settled(_MIB, _MIB, _MIB, 20 * _MIB, siblings=4)
    assert (made.judge, made.reference, made.candidate) == (2 * _GIB + 4 * _MIB, 3 * _GIB, 8 * _GIB)
    assert made.has_turns
    # With 6 GiB of inputs and of outputs, the kernel gets twice the memory that the reference used.
    made = settled(6 * _GIB, 6 * _GIB, 0, 18 * _GIB, siblings=4)
    assert (made.judge, made.reference, made.candidate) == (14 * _GIB, 24.5 * _GIB, 36 * _GIB)
    assert not made.has_turns
    assert made.total == 74.5 * _GIB <= plan.capacity(_H200, 4)
    assert made.evidence(None).outputs_bytes == 6 * _GIB
    made = settled(20 * _GIB, 20 * _GIB, _GIB, 50 * _GIB)
    assert made.total == plan.capacity(_H200, 1)
    assert 21 * _GIB <= made.candidate == made.total - made.judge - made.reference < 100 * _GIB


@given(totals, places, sizes, sizes, sizes, sizes)
def test_each_process_has_what_it_must_hold(
    total: int, siblings: int, inputs: int, outputs: int, weights: int, peak: int
) -> None:
    made = settled(inputs, outputs, weights, peak, total=total, siblings=siblings)
    assert made.judge >= inputs + outputs
    assert made.reference >= peak
    assert made.candidate >= outputs + weights
    whole = plan.capacity(total, siblings)
    must = outputs + weights
    assert made.total <= max(whole, made.judge + made.reference + must)
    if made.total > whole:
        assert made.candidate == must


@given(totals, places, sizes, sizes)
def test_a_first_call_has_all_memory_at_most(total: int, siblings: int, inputs: int, weights: int) -> None:
    whole = plan.capacity(total, siblings)
    first = plan.of_first_call(inputs, weights, whole=whole, siblings=siblings, alone=False)
    assert (first.judge, first.candidate, first.outputs) == (0, 0, None)
    assert inputs + weights <= first.total <= max(whole, inputs + weights)
    assert plan.of_first_call(inputs, weights, whole=whole, siblings=siblings, alone=True).total == whole
