"""Statistics of measured times, and the bounds below which a time is impossible. Clocks are tested on a GPU."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.coverage import PAIRS, figures
from kqueue.categories import Category
from kqueue.contract import Measurement, Outcome, Purpose, Timing
from tests.judge.loopback import Loopback, reference
from tests.judge.sources import problem
from workers.judge.candidate.harness import Harness
from workers.judge.channel.orders import Job, Opening, Order
from workers.judge.ending import EvaluationEnded
from workers.judge.gpu import environment
from workers.judge.pipeline import estimator, kept, speed_of_light, timing
from workers.judge.pipeline.cases import Case
from workers.judge.pipeline.clocks import Instruments
from workers.judge.pipeline.estimator import FEWEST, FEWEST_OVERHEADS, Series, is_settled, overhead_of, summarise
from workers.judge.pipeline.exchange import Exchange
from workers.judge.pipeline.kept import KeptCalls
from workers.judge.pipeline.proxy import Question
from workers.judge.pipeline.reference import BOUNDS, Reference
from workers.judge.slot_config import SlotConfig

CPU = SlotConfig(
    name="cpu-0", number=0, device="cpu", siblings=1, scratch=Path("/nowhere"), lock=Path("/nowhere/lock"), uid=None
)
GPU = replace(CPU, device="GPU-0")
WATCH = Instruments(environment.Watch(CPU))
CALLS = [1_000_000 + 1_000 * i for i in range(21)]


def series(**changes: object) -> Series:
    """Return calls of 1 to 1.02 ms with a launch overhead of about 0.3 ms, measured by a GPU's clock."""
    fields: dict[str, object] = {"calls": CALLS, "overheads": [290_000, 300_000, 330_000], "yardsticks": [50_000] * 5}
    return Series("gpu_clock", **(fields | changes))  # pyright: ignore[reportArgumentType]


def measured(**changes: object) -> Measurement:
    return summarise(series(**changes), 300_000, Timing(), on_gpu=True)


def test_the_null_is_subtracted_but_its_empty_kernel_is_not() -> None:
    """The launch overhead is measured with an empty kernel, and the time of that kernel is not subtracted."""
    assert measured().median_ms == pytest.approx(0.710)
    assert measured(empty_ns=1_500.0).median_ms == pytest.approx(0.7115)
    assert measured(empty_ns=1_500.0).overhead_ms == pytest.approx(0.3)


@pytest.mark.parametrize(("calls", "has_time"), [([290_000, 310_000, 320_000], True), ([290_000] * 3, False)])
def test_no_time_is_below_zero(calls: list[int], has_time: bool) -> None:
    """A call that is shorter than the launch overhead takes 0 ms, and a median of 0 ms is no time of the kernel."""
    taken = measured(calls=calls)
    assert min(taken.samples_ms or ()) == taken.min_ms == taken.low_ms == 0
    outcome = Outcome(category=Category.PASSED, runtime=taken, baseline=measured())
    assert [one is not None for one in (outcome.runtime_ms, outcome.speedup, taken.error)] == [has_time] * 3


def test_calls_that_wait_for_no_turn_show() -> None:
    """Calls that do not wait for a GPU time slice take far longer after an empty kernel, except very long calls."""
    assert not any(series(in_turn=ns).takes_no_turn for ns in ([], [1_012_000] * 5, [1_012_000] + [1_290_000] * 4))
    assert series(in_turn=[1_290_000] * 5).takes_no_turn
    assert not series(calls=[10**9] * 5, in_turn=[10**9 + 280_000]).takes_no_turn
    assert not series(calls=[], in_turn=[1_290_000] * 5).takes_no_turn
    # Time slices lengthen half of the calls.
    assert series(calls=[60_000, 210_000] * 10, overheads=[350_000] * 3, in_turn=[190_000] * 5).takes_no_turn
    few = [350_000, 350_000, 340_000]  # The interval of the difference has 0.
    assert not series(calls=[60_000, 360_000] * 5, overheads=few, in_turn=[190_000] * 5).takes_no_turn
    assert not series(calls=[298_000] * 5, overheads=[300_000] * 3, in_turn=[300_000] * 5).takes_no_turn
    made = [(1_012_000, 2), (1_012_000, 3), (1_290_000, 7), (1_290_000, 8)]
    assert [series(looks_in_turn=True, in_turn=[ns] * n).lacks_in_turn for ns, n in made] == [True, False] * 2
    assert not series(looks_in_turn=True, calls=[]).lacks_in_turn  # The device was throttled in all calls.


def test_the_first_call_on_the_inputs_of_a_turn_counts() -> None:
    """A kernel that works in an overhead call could answer a later call on the same inputs without work."""
    made = series(overheads=[])
    stopping = estimator.Stopping(Timing(), [made], random.Random(1))
    turns = [stopping.kinds(made, 0.5) for _ in range(50)]
    assert {kinds[0] for kinds in turns} == {estimator.Kind.SAMPLE}
    assert [estimator.Kind.SAMPLE, estimator.Kind.OVERHEAD] in turns


def test_no_call_is_shorter_than_the_shortest_that_was_verified() -> None:
    """A kernel that idles in most calls gains nothing, because the verified calls are not idle."""
    idle = series(calls=[400_000] * 15 + [1_000_000, 1_010_000, 1_020_000], kept=[1_010_000, 1_020_000])
    taken = summarise(idle, 300_000, Timing(), on_gpu=True)
    assert (taken.min_ms, taken.median_ms, taken.max_ms) == pytest.approx((0.710, 0.710, 0.720))
    assert measured(kept=[CALLS[3], CALLS[17]]) == measured()


DOUBLING = problem("x: x * 2", "return [torch.randn(64)]")


def test_each_call_is_as_likely_to_be_kept_as_any_other() -> None:
    """Calls of both halves are kept, and the times of the kept calls are known."""
    made = reference(DOUBLING, checks=1)
    made.answer_first(made.cache.first())
    seen = [0] * 14
    for _ in range(5):
        with made.timed() as exchange:
            calls = KeptCalls(made, 4, on_gpu=False)
            stopwatch = timing.Stopwatch(exchange, made, CPU, WATCH, calls)
            taken, _ = stopwatch.measure(Timing(calls=14, warmup=1, purpose=Purpose.PUBLISH), basis="cpu_clock")
        assert len(taken.calls) == 14
        assert set(taken.kept) <= set(taken.calls)
        for proof in calls._proofs:
            seen[proof.number - 1] += 1
        assert len(calls) == 4
        calls.verify()
    assert sum(seen) == 20
    assert any(seen[:7])
    assert any(seen[7:])


def pairs(made: Reference, wrong: Sequence[int]) -> KeptCalls:
    """Return ten kept calls next to the reference's calls on the same inputs, of which some are wrong."""
    calls = KeptCalls(made, 1, on_gpu=True)
    for number in range(10):
        [answered] = made.answer(made.cache.fresh(), exactly=False)
        outputs = [output.clone() for output in answered.outputs]
        beside = [output.clone() for output in answered.outputs]
        if number in wrong:
            outputs[0][0] += 1
        assert calls.offer(made.cache.again(answered.drawn, answered.seed), 1000, outputs, beside)
    return calls


def test_calls_next_to_the_reference_are_all_compared_and_few_are_answered_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only two calls and the mismatches cost the reference another answer. One wrong call of many is found."""
    made = reference(DOUBLING, checks=1)
    made.answer_first(made.cache.first())
    right, *wrong = [pairs(made, some) for some in ((), (0,), (3,), (7,), (9,))]
    assert right.keeps_all
    asked: set[Case] = set()
    ask = made.proxy.ask

    def noted(questions: Sequence[Question]) -> Any:
        asked.update(question.case for question in questions)
        return ask(questions)

    monkeypatch.setattr(made.proxy, "ask", noted)
    assert len(right.verify()) == len(asked) == 2
    for one in wrong:  # two calls that match are chosen by chance
        with pytest.raises(EvaluationEnded, match="right when checked, wrong when timed"):
            one.verify()


STRIDED = DOUBLING.replace("return x * 2", "return (x.reshape(8, 8) + 1).t()")


@pytest.mark.parametrize("disturbed", ["theirs", "dense"])
def test_what_disturbs_some_copies_changes_nothing_of_what_they_take_less(
    disturbed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = reference(STRIDED, checks=1)
    made.answer_first(made.cache.first())
    stopwatch = timing.Stopwatch(made.proxy.exchange, made, GPU, WATCH)
    stopwatch._series = Series("gpu_clock", layouts={((1, 8),)})
    assert not stopwatch.has_other_layouts
    stopwatch._series = Series("gpu_clock", layouts={((1, 8),), ((8, 1),)})
    assert stopwatch.has_other_layouts
    others = itertools.cycle([90_000.0, 0.0, 50_000.0])

    def copy_ns(_: Any, steps: tuple[int, ...], __: Any) -> float:
        which, takes = ("theirs", 200_000.0) if steps == (1, 8) else ("dense", 80_000.0)
        return takes + (next(others) if which == disturbed else 0.0)

    monkeypatch.setattr(timing.clocks, "copy_ns", copy_ns)
    stopwatch.compare_layouts()
    assert stopwatch._series.spared_ns == 120_000


#: Problem with outputs of 1088 KiB, more than :func:`small_pieces` allows to keep of a call.
LARGE = problem("x: (x.repeat(17 << 8), x + 1)", "return [torch.randn(64)]")


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide the bounds of the kept bytes of a call by 64."""
    for name in ("_WHOLE_BYTES", "_KEPT_BYTES", "_PIECE_BYTES"):
        monkeypatch.setattr(kept, name, getattr(kept, name) // 64)


def verified(made: Reference, kernel: str) -> int:
    """Verify three timed calls of a kernel for a problem. Return the number of bytes that were kept of them."""
    first = made.cache.first()
    made.answer_first(first)
    process = Loopback(Harness)
    process.order(Order.OPEN, payload=Opening("cpu"))
    process.order(Order.LOAD, payload=Job(kernel, "ModelNew", torch.float32, 0))
    process.order(Order.CONSTRUCT, payload=[])
    exchange = Exchange(process, made.form, "cpu")
    exchange.bind_inputs(first.inputs)
    exchange.bind_outputs(made.form.output_specs)
    exchange.outputs(process.order(Order.RUN, seed=first.seed))
    calls = KeptCalls(made, 3, on_gpu=False)
    timing.Stopwatch(exchange, made, CPU, WATCH, calls).measure(Timing(calls=5, warmup=0), basis="cpu_clock")
    nbytes = sum(tensor.nbytes for proof in calls._proofs for tensor in proof.outputs)
    assert len(calls) == 3
    calls.verify()
    return nbytes


def kernel_of(problem: str, body: str) -> str:
    head = problem.partition("        return")[0].replace("Model(", "ModelNew(")
    return f"{head}        {body}"


@pytest.mark.usefixtures("small_pieces")
def test_of_large_outputs_pieces_are_kept() -> None:
    """At most 16 MiB of a call's large outputs are kept, and small outputs are kept whole. Inputs are not kept."""
    nbytes = verified(reference(LARGE, checks=1), kernel_of(LARGE, "return x.repeat(17 << 8), x + 1"))
    assert 3 * ((15 << 14) + 64 * 4) <= nbytes <= 3 * ((16 << 14) + 64 * 4)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("wrong", ["large[-(1 << 16) :] = 0", "small.zero_()"], ids=["a quarter", "the small one"])
def test_a_wrong_piece_of_a_large_output_is_found(wrong: str) -> None:
    body = f"""large, small = x.repeat(17 << 8), x + 1
        self.n = getattr(self, "n", 0) + 1
        if self.n > 1: {wrong}
        return large, small"""
    with pytest.raises(EvaluationEnded, match="right when checked, wrong when timed") as raised:
        verified(reference(LARGE, checks=1), kernel_of(LARGE, body))
    assert raised.value.outcome.category is Category.NONDETERMINISTIC
    assert raised.value.outcome.facts.first
    assert raised.value.outcome.facts.map is None


#: Problem whose answers are approximately multiples of a quarter.
COARSE = problem("x: (x + 3e6) - 3e6", "return [10 * torch.randn(64, 64)]")


@pytest.mark.parametrize(("problem", "exactly"), [(DOUBLING, 2), (COARSE, 3)], ids=["within", "excused"])
def test_two_calls_and_those_that_need_an_excuse_are_verified_in_float64(
    problem: str, exactly: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = reference(problem, checks=1)
    sharpen = made.sharpen
    asked: list[Case] = []

    def sharpened(cases: Sequence[Case]) -> None:
        assert all(case.exact is None for case in cases)
        sharpen(cases)
        asked.extend(case for case in cases if case.exact is not None)

    monkeypatch.setattr(made, "sharpen", sharpened)
    verified(made, kernel_of(problem, "return x * 2" if problem is DOUBLING else "return x.clone()"))
    assert len(asked) == exactly


def test_a_measurement_says_how_it_was_taken() -> None:
    taken = measured(discarded=7)
    assert (taken.basis, taken.count, taken.discarded, taken.yardstick_ms) == ("gpu_clock", 21, 7, 0.05)
    assert taken.precision == pytest.approx(0.004 / 0.710, rel=0.3)
    assert taken.q1_ms < taken.median_ms < taken.q3_ms
    # On a GPU the median overhead counts. On a CPU the minimum counts, because other processes lengthen it.
    assert (overhead_of(series(), on_gpu=True), overhead_of(series(), on_gpu=False)) == (300_000, 290_000)


def test_a_slowed_null_does_not_count() -> None:
    """The smaller overhead of kernel and reference counts, corrected for changes of the judge's own work."""
    reference = measured()
    assert overhead_of(series(overheads=[900_000] * 5), reference, on_gpu=True) == pytest.approx(300_000)
    assert overhead_of(series(overheads=[250_000] * 5), reference, on_gpu=True) == 250_000
    quieter = series(overheads=[900_000] * 5, yardsticks=[40_000] * 5)
    assert overhead_of(quieter, reference, on_gpu=True) == pytest.approx(290_000)
    dense = series(overheads=[900_000] * 5, spared_ns=120_000.0)
    assert overhead_of(dense, reference, on_gpu=True) == pytest.approx(180_000)
    assert overhead_of(series(spared_ns=1e9, overheads=[100] * 5), on_gpu=True) == 100
    assert overhead_of(series(spared_ns=1e9), reference, on_gpu=True) == 0


SOURCE = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1 << 10))
    def forward(self, x):
        return {outputs}
def get_inputs():
    return [torch.randn(1 << 10)]
"""


def test_the_floor_counts_what_must_be_written_once() -> None:
    for outputs, written in (
        ("x * 2", 4 << 10),
        ("(x * 2, x + 1)", 8 << 10),
        ("(x, x * 2)", 4 << 10),
        ("[(y := x * 2), y[:512], y.view(32, 32)]", 4 << 10),
        ("(x * 2, self.weight)", 4 << 10),
        ("x.view(32, 32)", 0),
        ("x.sum().expand(1 << 10)", 4),
    ):
        made = reference(SOURCE.replace("{outputs}", outputs), checks=1)
        made.answer_first(made.cache.first())
        found = speed_of_light.floor(made.cache.input_bytes, made.written_bytes, 4e12)
        assert (found.bytes_in, found.bytes_out) == (4 << 10, written), outputs
        assert found.floor_out_ms == pytest.approx(written / 4e12 * 1e3)


def took(median_ms: float, *, high_ms: float | None = None) -> Measurement:
    """Return the measurement of a kernel with this time, and with an error of 1 us or this upper end of its range."""
    high_ms = median_ms + 0.001 if high_ms is None else high_ms
    return measured().model_copy(update={"median_ms": median_ms, "high_ms": high_ms})


def test_faster_than_memory_is_refused_with_the_figures() -> None:
    known = speed_of_light.floor(0, 400 << 20, 4e12)
    speed_of_light.enforce(known, measured())
    with pytest.raises(EvaluationEnded) as raised:
        speed_of_light.enforce(known, took(0.01))
    assert raised.value.outcome.category is Category.REWARD_HACK
    assert raised.value.outcome.facts.hack == "faster_than_memory"
    speed_of_light.enforce(known, took(0.01, high_ms=0.1))
    # Any time passes where the bound is below the clock's resolution or where a kernel writes nothing.
    tiny, nothing = speed_of_light.floor(0, 4096, 4e12), speed_of_light.floor(0, 0, 4e12)
    speed_of_light.enforce(tiny, took(-0.0005))
    speed_of_light.enforce(nothing, took(-0.005))
    with pytest.raises(EvaluationEnded):
        speed_of_light.enforce(tiny, took(-0.005))


def test_what_must_be_read_counts_only_where_a_time_is_too_short_for_all_inputs() -> None:
    known = speed_of_light.floor(400 << 20, 4096, 4e12)
    slow, fast = took(0.09), took(0.03)
    assert not speed_of_light.is_beyond(known, slow, 0)
    assert speed_of_light.is_beyond(known, fast, 0)
    assert speed_of_light.is_beyond(known, fast, 100 << 20)
    assert not speed_of_light.is_beyond(known, fast, 300 << 20)
    assert speed_of_light.cacheable(fast, 50 << 20) == 0
    for warm in ({"cold_l2": False}, {"basis": "cpu_clock"}):
        assert speed_of_light.cacheable(fast.model_copy(update=warm), 50 << 20) == 50 << 20
    speed_of_light.enforce(known, fast)
    speed_of_light.enforce(speed_of_light.needing(known, 100 << 20, 0), fast)
    speed_of_light.enforce(speed_of_light.needing(known, 1 << 40, 300 << 20), fast)
    bound = speed_of_light.needing(known, 1 << 40, 0)
    with pytest.raises(EvaluationEnded):
        speed_of_light.enforce(bound, fast)
    assert bound.bytes_needed == 400 << 20
    assert bound.floor_needed_ms == pytest.approx(0.105, rel=0.01)


def test_a_slow_reference_is_asked_once_for_each_call_that_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without time for float64, only wrong calls need another request: for the reference's own rounding errors."""
    made = reference(COARSE, bounds=replace(BOUNDS["cpu"], quick_s=0.0), checks=1)
    order_each, asked = made.process.order_each, 0

    def counted(order: Order, count: int, **arguments: Any) -> Any:
        nonlocal asked
        asked += count
        return order_each(order, count, **arguments)

    monkeypatch.setattr(made.process, "order_each", counted)
    with pytest.raises(EvaluationEnded, match="right when checked, wrong when timed"):
        verified(made, kernel_of(COARSE, "return x.clone()"))
    # The first answer, twice because it is not quick, the verified calls, their excuses, and a check of a wrong one.
    assert asked == 2 + 3 + 3 + 2


def timed_twice(own_us: float, overhead_us: float = 3.0, **changes: object) -> Series:
    """Return the series of a process that takes 10 us by the judge's clock, and ``own_us`` by its own."""
    own, own_overheads = [int(1000 * (own_us + overhead_us - 2))] * 20, [int(1000 * overhead_us)] * 5
    times: dict[str, object] = {"calls": [308_000] * 20, "overheads": [300_000] * 5, "empty_ns": 2_000.0}
    return series(**(times | changes), own=own, own_overheads=own_overheads)


def refined(own_us: float, overhead_us: float = 3.0, reference_us: float = 10.0, **changes: object) -> Measurement:
    """Return the measurement of such a candidate, next to a reference that takes ``reference_us`` by its own clock."""
    candidate = timed_twice(own_us, overhead_us, **changes)
    return summarise(candidate, 300_000, Timing(), timed_twice(reference_us), on_gpu=True)


def test_a_process_s_own_clock_counts_only_as_far_as_the_judge_s_confirms_it() -> None:
    for own_us, taken_us in ((10.5, 10.5), (7.0, 7.0), (25.0, 25.0), (5.0, 10.0), (0.5, 10.0)):
        taken = refined(own_us)
        assert taken.median_ms == pytest.approx(taken_us / 1e3), own_us
        assert taken.is_fine is (own_us == taken_us)
    # An overhead far above the reference's would make the rest look short.
    assert refined(9.0, overhead_us=20.0).median_ms == pytest.approx(0.0254)
    assert not refined(9.0, kept=[309_000]).is_fine
    # If the reference's clocks differ, that difference is added to the kernel's limit, up to 2 us.
    assert [refined(own_us, reference_us=9.0).is_fine for own_us in (5.0, 4.5)] == [True, False]
    assert [refined(own_us, reference_us=3.0).is_fine for own_us in (4.0, 3.0)] == [True, False]
    assert refined(10.5).error == pytest.approx(0.03, abs=0.005)
    assert not summarise(series(own=[-1] * 21, own_overheads=[3_000] * 5), 3e5, Timing(), series(), on_gpu=True).is_fine


def test_calls_go_on_until_it_is_settled_which_clock_counts() -> None:
    """Few calls that differ a lot do not confirm the process's own time, and refute it only if it is far off."""
    noisy, close = ({"calls": [low] * 10 + [high] * 10} for low, high in ((301_000, 315_000), (307_000, 309_000)))
    reference = timed_twice(10.0)
    assert [is_settled(timed_twice(own_us), reference) for own_us in (10.0, 7.0, 2.0)] == [True] * 3
    assert [is_settled(timed_twice(own_us, **noisy), reference) for own_us in (10.0, 5.0)] == [False, False]
    assert [is_settled(timed_twice(own_us, **close), reference) for own_us in (6, 5, 2)] == [True, False, True]
    assert is_settled(timed_twice(10.0, calls=[5_302_000] * 10 + [5_314_000] * 10), reference)
    # The overhead calls were too long.
    assert not is_settled(timed_twice(10.0, overheads=[313_000] * 3), timed_twice(10.0, overheads=[313_000] * 3))


def test_time_slices_of_other_contexts_cancel_out() -> None:
    """They lengthen about half of the calls and overhead calls, so the median of one of both is a slice longer."""
    busy, quieter = ([308_000] * short + [458_000] * (20 - short) for short in (9, 11))
    mixed = {"overheads": [300_000] * 3 + [450_000] * 2}
    kernel, reference = (timed_twice(10.0, calls=calls, **mixed) for calls in (quieter, busy))
    for one, other in ((kernel, reference), (reference, kernel), (reference, None)):
        first = None if other is None else summarise(other, overhead_of(other, on_gpu=True), Timing(), on_gpu=True)
        overhead = overhead_of(one, first, other, on_gpu=True)
        assert summarise(one, overhead, Timing(), other, on_gpu=True).is_fine
        taken = summarise(one, overhead, Timing(), other, on_gpu=True, fine=False)
        assert (taken.median_ms, taken.is_fine) == (pytest.approx(0.010), False)


def test_a_kernel_that_is_slow_in_almost_half_of_its_calls_is_as_slow_as_their_mean() -> None:
    uneven = series(calls=[400_000] * 11 + [1_000_000] * 9)
    assert summarise(uneven, 300_000, Timing(), series(), on_gpu=True).median_ms == pytest.approx(0.37)
    assert summarise(uneven, 300_000, Timing(), uneven, on_gpu=True).median_ms == pytest.approx(0.1)
    # Time slices of other contexts lengthen up to a third of the calls.
    disturbed = series(calls=[400_000] * 14 + [1_000_000] * 6)
    assert summarise(disturbed, 300_000, Timing(), series(), on_gpu=True).median_ms == pytest.approx(0.1)


@pytest.mark.parametrize(("between", "added"), [([0] * 17 + [4_000_000] * 4, False), ([150_000] * 21, True)])
def test_work_between_the_calls_on_a_cpu_is_added_if_it_is_no_accident(between: list[int], added: bool) -> None:
    def taken(spans: list[int], *, on_gpu: bool) -> Measurement:
        late = Series("cpu_clock", calls=CALLS, overheads=[300_000] * 3, between=spans)
        return summarise(late, 300_000, Timing(), series(), on_gpu=on_gpu)

    assert taken(between, on_gpu=True) == taken([], on_gpu=True)
    none, some = taken([], on_gpu=False), taken(between, on_gpu=False)
    assert some.between_ms == (0.15 if added else None)
    assert some.median_ms - none.median_ms == pytest.approx(0.15 * added)
    assert some.high_ms is not None
    assert some.high_ms > some.median_ms > (some.low_ms or 0)


def test_the_reference_is_timed_in_turn_and_variants_are_called_and_verified() -> None:
    made = reference(DOUBLING, checks=1)
    made.answer_first(made.cache.first())
    other = reference(DOUBLING, checks=1)
    other.answer_first(other.cache.first())
    calls = KeptCalls(made, 3, on_gpu=False)
    with made.timed(beside=True) as exchange, other.timed() as candidate:
        own, beside = timing.Stopwatch(candidate, made, CPU, WATCH, calls).measure(
            Timing(calls=9, warmup=1),
            basis="cpu_clock",
            beside=timing.Beside(exchange, contextlib.nullcontext),
            variants=made.cache.vary(made.cache.new(), ("uniform", "blocks")),
        )
    assert beside is not None
    assert (len(own.calls), len(own.variants)) == (9, 2)
    assert len(beside.calls) >= FEWEST  # A slow reference is called less often.
    assert len(calls) == 5
    assert len(calls.verify()) == 2  # Figures are given of those that are compared with float64 answers.


def test_a_reference_without_time_left_still_has_its_overhead_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overhead calls are made at random turns, so the time of a reference in turn can end before them."""
    monkeypatch.setattr(estimator, "SERIES_S", {"cpu_clock": 0.0})
    made, other = reference(DOUBLING, checks=1), reference(DOUBLING, checks=1)
    for each in (made, other):
        each.answer_first(each.cache.first())
    with made.timed(beside=True) as exchange, other.timed() as candidate:
        stopwatch, turns = (
            timing.Stopwatch(candidate, made, CPU, WATCH),
            timing.Beside(exchange, contextlib.nullcontext),
        )
        for _ in range(12):
            _, beside = stopwatch.measure(Timing(calls=100, warmup=0), basis="cpu_clock", beside=turns)
            assert beside is not None
            assert len(beside.overheads) >= FEWEST_OVERHEADS


def test_of_simulated_intervals_95_percent_contain_the_truth() -> None:
    """The seed is fixed. A stricter purpose makes more calls. `benchmarks/coverage.py` simulates more."""
    last = 0.0
    for purpose in (Purpose.TRAIN, Purpose.RANK, Purpose.PUBLISH):
        names = "Triton matmul", "0.3 ms", "1 ms, rough", "two lines, itself, busy"
        found = [figures(PAIRS[name], purpose, 100, 2) for name in names]
        assert 0.93 <= sum(one["covered"] for one in found) / 4 <= 0.97
        assert last < (last := sum(one["calls"] for one in found))


def test_a_histogram_holds_every_call() -> None:
    """The last bin includes much longer calls, and equal calls make one bin."""
    taken = measured(calls=[1_000_000 + 1_000 * number for number in range(40)] + [90_000_000]).histogram
    assert taken is not None
    assert (len(taken.counts), sum(taken.counts)) == (20, 41)
    assert taken.counts[0] > 0
    assert taken.low_ms == pytest.approx(0.700)
    assert taken.high_ms < 1.0
    alike = measured(calls=[1_000_000] * 9).histogram
    assert alike is not None
    assert (alike.counts, alike.low_ms) == ((9,), alike.high_ms)
