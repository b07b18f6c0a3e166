"""Duels: the sequential test, the ends of a duel, and the rounds that it requests."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import cycle

import pytest

from kqueue.categories import Category
from kqueue.contract import Outcome, Request, Result
from kqueue.errors import InvalidRequest
from kqueue.evidence import Measurement
from kqueue.features.duel.duels import ERROR, Duel, Match, Trial, critical, duel, looks, order, state, state_of

A = Request(problem="class Model: pass", kernel="a = 1", backend="torch", kernel_label="a")
B = A.model_copy(update={"kernel": "b = 1", "kernel_label": "b"})


def trial(speedup: float | None = 1.0, *, category: Category = Category.PASSED, clock: str = "cpu_clock") -> Trial:
    return Trial(category, speedup, (clock, False), "some device")


def fight(draw: Callable[[], float], ratio: float, *, within: float | None = None) -> Duel:
    """Return the end of a simulated duel, each of whose times has an error of ``draw()``."""
    rounds: list[tuple[Trial | None, Trial | None]] = []
    now = state(rounds, within=within)
    while now.reason is None:
        rounds += [(trial(math.exp(draw())), trial(ratio * math.exp(draw()))) for _ in range(now.due)]
        now = state(rounds, within=within)
    return now


def test_critical_values_are_those_of_students_t() -> None:
    # From a table of the distribution.
    assert [round(critical(n, 0.05), 3) for n in (1, 2, 5, 39)] == [12.706, 4.303, 2.571, 2.023]
    assert looks(40) == (10, 14, 20, 28, 40)
    assert looks(20) == (10, 14, 20)
    assert looks(7) == (7,)


def test_equal_kernels_seldom_get_a_winner_and_a_slower_one_is_found() -> None:
    chance = random.Random(7)

    def normal() -> float:
        return chance.gauss(0, 0.005)

    def heavy() -> float:
        return normal() * (5 if chance.random() < 0.1 else 1)

    turns = cycle((1, 0))

    def two_kinds() -> float:
        """Return errors that give the values of rounds two kinds. The t-test alone finds a winner in 4 %."""
        return normal() / 10 + next(turns) * chance.choice((-0.01, 0.01))

    for draw in (normal, heavy, two_kinds):
        assert sum(fight(draw, 1.0).winner is not None for _ in range(700)) <= ERROR * 700
    slower = [fight(normal, 0.99) for _ in range(100)]
    assert sum(end.winner == "a" for end in slower) >= 90
    assert sum([end.interval is not None and end.interval[0] <= 0.99 <= end.interval[1] for end in slower]) >= 97
    assert sum(end.reason == "equal" for end in [fight(normal, 1.0, within=0.01) for _ in range(100)]) >= 90


@pytest.mark.parametrize("against", [0, 1])
def test_rounds_that_all_agree_decide_at_the_first_look(against: int) -> None:
    """Their spread does not matter. With a round against them, the t-test must agree too."""
    now = state([(trial(), trial(speedup)) for speedup in [5.0] * (8 - against) + [1.01, 1e3] + [0.9] * against])
    assert (now.rounds, now.winner) == (10, None if against else "b")
    if not against:
        assert now.interval == (pytest.approx(1.01), pytest.approx(1e3))
        assert now.certainty is not None
        assert now.certainty >= 1 - ERROR


def test_ends() -> None:
    wrong = trial(None, category=Category.WRONG_VALUES)
    lost = trial(None, category=Category.WORKER_LOST)
    good = trial()

    def end(*rounds: tuple[Trial | None, Trial | None]) -> Duel:
        return state(rounds)

    assert end().due == 1
    assert end((good, None)).due == 0
    # A wrong kernel loses at once, however many rounds are pending, but only to one that has passed.
    assert (one := end((good, wrong), (None, None))).winner == "a"
    assert (one.reason, one.message) == ("failed", "A wins, because B ended as wrong_values")
    assert end((lost, wrong), (None, None)).reason is None
    assert end((wrong, wrong)).reason == "both_failed"
    assert end((good, trial(None, category=Category.INVALID_PROBLEM))).reason == "problem"
    assert end((good, trial(None, category=Category.CANCELLED))).reason == "cancelled"
    # Void rounds are repeated, within a bound: a failure of the fleet, other clocks, another device, no time.
    void = [(good, lost), (good, trial(clock="gpu_clock")), (trial(None), good)]
    now = end(*void, (good, Trial(Category.PASSED, 1.0, ("cpu_clock", False), "another device")), (good, good))
    assert (now.rounds, now.due, now.reason) == (1, 9, None)
    assert now.voids == {"worker_lost": 1, "other clock": 1, "no time": 1, "other device": 1}
    assert end(*[(good, lost)] * 6).reason == "void"
    # A kernel that passes without a time would never have one.
    now = end((good, Trial(Category.PASSED, None, None, "some device")))
    assert (now.reason, now.winner, now.voids) == ("void", None, {"not timed": 1})
    assert "is never timed here, and its verdict says why" in now.message
    assert "larger inputs" not in end(*[(good, lost)] * 6).message
    assert "larger inputs" in end(*[(good, trial(clock="gpu_clock"))] * 6).message
    # By two clocks, only the least difference that the intervals allow counts.
    slow = replace(trial(1.0, clock="gpu_clock"), interval=(0.8, 1.25))
    fast, close = (replace(trial(speedup), interval=(speedup / 1.25, speedup * 1.25)) for speedup in (4.0, 1.5))
    now = end(*[(slow, fast)] * 10)
    assert now.winner == "b"
    assert now.ratio == pytest.approx(3.2 / 1.25)
    assert end(*[(fast, slow)] * 10).winner == "a"
    assert end(*[(slow, close)] * 6).voids == {"other clock": 6}
    # A kernel that stops its own clock is compared by the judge's, by which both were timed.
    own, stopped = (replace(good, clock=("cpu_clock", fine), outside=by) for fine, by in ((True, 1.25), (False, 1.0)))
    assert (end(*[(own, stopped)] * 10).winner, end(*[(own, stopped)] * 10).ratio) == ("a", pytest.approx(0.8))
    # Equal times without any spread have no winner.
    assert end(*[(good, good)] * 40).reason == "rounds"
    assert end(*[(good, trial(1.01))] * 10).winner == "b"


def outcome(speedup: float) -> Outcome:
    def time(median_ms: float) -> Measurement:
        times = dict.fromkeys(("median_ms", "q1_ms", "q3_ms", "mean_ms", "min_ms", "max_ms"), median_ms)
        return Measurement(basis="cpu_clock", count=9, std_ms=0, overhead_ms=0, cold_l2=False, **times)

    return Outcome(category=Category.PASSED, runtime=time(1.0), baseline=time(speedup))


def test_a_driver_requests_each_round_once_in_random_order_up_to_the_next_look() -> None:
    chance = random.Random(3)
    asked: list[list[Request]] = []
    closed: list[bool] = []

    def judge(requests: list[Request]) -> Iterator[Result]:
        asked.append(requests)
        try:
            for request in requests:
                yield outcome((1.02 if request.kernel == B.kernel else 1.0) * math.exp(chance.gauss(0, 0.01)))
        finally:
            closed.append(True)

    match = Match.of(A, B, most=28, within=0.001)
    *_, end = duel(judge, match)
    assert (end.winner, end.reason, end.most) == ("b", "faster", 28)
    assert end.interval is not None
    assert end.interval[0] > 1
    assert [len(requests) for requests in asked[:2]] == [2, 18]
    assert len(closed) == len(asked)
    everything = [request for requests in asked for request in requests]
    assert len(everything) == 2 * end.rounds == len({request.idempotency_key for request in everything})
    assert {request.batch for request in everything} == {f"duel-{match.id}"}
    assert not any(request.reuse for request in everything)
    for number in range(end.rounds):
        pair = [request.kernel for request in everything[2 * number : 2 * number + 2]]
        assert pair == [(A.kernel, B.kernel)[side] for side in order(match.id, number)]
    assert len({order(match.id, number) for number in range(28)}) == 2
    # The id tells a reader all that the state depends on.
    assert state_of(match.id, []) == Duel(id=match.id, most=28, due=1)
    with pytest.raises(InvalidRequest, match="an id of a duel"):
        state_of("of-mine", [])


def test_a_refused_request_and_duels_that_cannot_be() -> None:
    def refuse(requests: list[Request]) -> Iterable[InvalidRequest]:
        return [InvalidRequest("kernel: no") for _ in requests]

    with pytest.raises(InvalidRequest, match="kernel: no"):
        list(duel(refuse, Match.of(A, B)))
    other = B.model_copy(update={"problem": "class Model: ..."})
    with pytest.raises(InvalidRequest, match="only kernel, trees"):
        Match.of(A, other)
    untimed = {"settings": {"timing": {"purpose": "check"}}}
    with pytest.raises(InvalidRequest, match="compares times"):
        Match.of(*(Request.model_validate(one.model_dump() | untimed) for one in (A, B)))
    for wrong in ({"most": 6}, {"most": 101}, {"within": 0.0}, {"within": 1.0}):
        with pytest.raises(InvalidRequest, match=f"^{'rounds' if 'most' in wrong else 'within'}: give"):
            Match.of(A, B, **wrong)  # pyright: ignore[reportArgumentType]


def test_in_a_notebook() -> None:
    """A duel shows its state, and hostile labels are escaped."""
    page = Duel(winner="b", reason="rounds", a_label="<script>")._repr_html_()
    assert "B is " in page
    assert "A is &lt;script&gt;" in page
