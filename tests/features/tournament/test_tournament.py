"""The choices of a tournament, on simulated samples."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.tournaments import replay
from kqueue.features.search.plan import Entry, Result
from kqueue.features.tournament.tournament import FULL, Tournament


def test_the_winner_is_within_a_percent_at_a_fifth_of_the_device_time() -> None:
    """Of 8 tournaments of 200 kernels, 7 find a kernel within 1 % of the fastest one."""
    found = [replay(200, 0.02, seed) for seed in range(8)]
    assert sum(speed >= 0.99 for speed, _ in found) >= 7
    assert max(part for _, part in found) <= 0.2


def test_the_best_are_judged_in_full() -> None:
    """The wrong ones leave at once, and a kernel that fails in full is replaced by the next one."""
    plan = Tournament(30, 100, 1000.0)
    results: list[Result] = []
    batches: list[list[Entry]] = []
    tried = Counter[Entry]()

    def judge(entry: Entry) -> Result:
        index = int(entry.config[0])
        right = index % 3 > 0 and not (entry.repeat == FULL and index == 29)
        tried[entry] += 1
        if entry.repeat == 2 or (index == 26 and entry.repeat == FULL and tried[entry] == 1):
            return Result(entry, index == 28, None, 0.1)  # no time, or a failure of the fleet
        return Result(entry, right, 1.0 + index if right else 0.0, 0.1)

    while (batch := plan.next(results)) is not None:
        batches.append(batch)
        results += map(judge, batch)
    right_first = next(number for number, batch in enumerate(batches) if len(batch) > 1)
    assert [one.right for one in results[:right_first]] == [False] * (right_first - 1) + [True]
    assert {int(one.config[0]) for batch in batches[right_first + 1 :] for one in batch} <= set(range(16, 30))
    assert [sorted(int(one.config[0]) for one in batch) for batch in batches[-2:]] == [[26, 28, 29], [25, 26]]
    assert {one.calls for one in batches[-1]} == {100}
    places = plan.places(results)
    assert [(one.kernel, one.full) for one in places] == [(28, True), (26, True), (25, True)]
    leads = [one.lead for one in places if one.lead is not None]
    assert [(lead.winner, lead.rounds >= 6) for lead in leads][:2] == [("b", True), ("b", True)]


def test_a_small_budget_judges_some() -> None:
    """The quote is known after the first correct kernel, and holds."""
    plan = Tournament(400, 100, 30.0)
    results: list[Result] = []
    while (batch := plan.next(results)) is not None:
        results += [Result(one, True, 1.0 + int(one.config[0]), 0.01 * (20 + one.calls) / 25) for one in batch]
    quote = plan.quote(results[:1])
    assert quote is not None
    assert 0.05 < sum(one.device_s for one in results) <= 30.0
    assert quote.coarse_s == pytest.approx(0.01)
    few = Tournament(400, 100, 1.0).quote(results[:1])
    assert few is not None
    assert few.kernels < 100
    assert few.least_s < 1.0
