"""The next kernels and the winner of a tuning, with scores that the tests define."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kqueue.errors import InvalidRequest
from kqueue.features.search.plan import ORIGINAL, Entry, Result
from kqueue.features.tune.halving import Halving, Winner
from kqueue.features.tune.space import Space, from_values, parse

KERNEL = "A = 1\nB = 1\nMODE = 'x'\nSWITCH = False\n\n\nclass ModelNew: ...\n"


def halving(*grid: str, calls: int = 100, trials: int = 64, finalists: int = 2, repeats: int = 2) -> Halving:
    return Halving(Space(KERNEL, parse(grid)), calls, trials, finalists, repeats)


def run(plan: Halving, score: Callable[[Entry], float | None]) -> tuple[list[list[Entry]], list[Result]]:
    """Run a complete tuning with score 0 for a wrong kernel. Return the batches and all results."""
    batches: list[list[Entry]] = []
    results: list[Result] = []
    while (batch := plan.next(results)) is not None:
        batches.append(batch)
        scores = [(entry, score(entry)) for entry in batch]
        results += [Result(entry, bool(value), value) for entry, value in scores]
    return batches, results


def won(plan: Halving, results: list[Result]) -> Winner:
    winner = plan.winner(results)
    assert winner is not None
    return winner


def value(entry: Entry) -> int:
    return 1 if entry.config == ORIGINAL else int(entry.config[0])


def test_values_are_listed_or_ranges() -> None:
    for word, values in (
        ("A=64,128", ("64", "128")), ("A=1..3", ("1", "2", "3")), ("A=16..64..16,x", ("16", "32", "48", "64", "x")),
        ("A=32..256..x2", ("32", "64", "128", "256")), ("macro:A=-1..0", ("-1", "0")),
    ):  # fmt: skip
        assert parse([word]) == [(word.partition("=")[0], values)]
    for word in ("A", "A=", "A=1,", "A=4..1", "A=0..8..x2", "A=1..8..0", "A=1..8..x1"):
        with pytest.raises(InvalidRequest, match="write"):
            parse([word])
    assert from_values({"A": [1, 2.5, True, "x"]}) == [("A", ("1", "2.5", "true", "x"))]
    with pytest.raises(InvalidRequest, match="give numbers"):
        from_values({"A": [[1]]})


def test_a_grid_that_is_refused() -> None:
    """Missing, repeated, too many and ill-typed values are refused."""
    for grid, says in (
        ([], "at least one name"), (["A=1,2", "A=3"], "given twice"), (["A=2,2"], "given twice"),
        (["A=1"], "nothing to try"), (["A b=1,2"], "is not a name"), (["A=1..2000"], "1 to 1000 values"),
        (["A=1,x"], "cannot be 'x'"), (["A=2,1,0x1"], "A: 1 and 0x1 are the same value"),
        (["A=+1,01,1"], "cannot be '01'"), (["SWITCH=True,true"], "True and true are the same value"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest, match=says):
            Space(KERNEL, parse(grid))


def test_a_small_grid_is_judged_whole_and_halved() -> None:
    """All kernels get few calls, the best third more, and the finalists and the original all calls."""
    batches, _ = run(halving("A=0..8"), lambda entry: value(entry))
    assert [(len(batch), {entry.calls for entry in batch}) for batch in batches] == [(9, {11}), (3, {33}), (6, {100})]
    # The original's configuration is not judged twice.
    assert {entry.config for entry in batches[0]} == {ORIGINAL, *((str(n),) for n in (*range(9),) if n != 1)}
    assert [entry.config for entry in batches[1]] == [("8",), ("7",), ("6",)]
    assert [entry.config for entry in batches[2]] == [ORIGINAL, ("8",), ("7",)] * 2
    assert [entry.repeat for entry in batches[2]] == [1, 1, 1, 2, 2, 2]


def test_wrong_and_unknown_kernels_drop_out_at_once() -> None:
    """A kernel that fails or has no score is not judged again."""

    def score(entry: Entry) -> float | None:
        return {8: 0.0, 7: None}.get(value(entry), value(entry))

    plan = halving("A=0..8")
    batches, results = run(plan, score)
    assert {entry.config for batch in batches[1:] for entry in batch} == {ORIGINAL, ("6",), ("5",)}
    winner = won(plan, results)
    assert (winner.config, winner.beats) == (("6",), True)


def test_a_few_go_to_the_last_comparison_at_once() -> None:
    batches, _ = run(halving("A=2,3"), value)
    assert [len(batch) for batch in batches] == [3, 6]


@pytest.mark.parametrize(
    ("own", "other", "beats"),
    [((10, 10), (20, 30), True), ((10, 25), (20, 30), False), ((10, 10), (10, 10), False), ((30, 30), (20, 25), False)],
)
def test_what_wins_beats_the_original_beyond_its_spread(
    own: tuple[float, float], other: tuple[float, float], beats: bool
) -> None:
    """Each of its scores is better than every score of the original. Otherwise the original wins."""

    def score(entry: Entry) -> float:
        scores = own if entry.config == ORIGINAL else other
        return scores[entry.repeat - 1] if entry.repeat else 50.0

    plan = halving("A=2", finalists=1)
    _, results = run(plan, score)
    winner = won(plan, results)
    assert (winner.config, winner.beats, winner.compared) == (("2",) if beats else ORIGINAL, beats, True)
    assert plan.standings(results, winner)[0].config == winner.config
    # A duel decides instead, if there was one.
    assert plan.challenger(results) == ("2",)
    for confirmed, config in ((True, ("2",)), (False, ORIGINAL)):
        assert plan.winner(results, confirmed) == Winner(config, beats=confirmed, compared=True)


@pytest.mark.parametrize("last", [0.0, None])
def test_a_finalist_that_fails_or_is_unknown_once_has_not_won(last: float | None) -> None:
    """One better score of two is not enough."""
    plan = halving("A=2,3")
    _, results = run(plan, lambda entry: last if (entry.config, entry.repeat) == (("3",), 2) else value(entry))
    winner = won(plan, results)
    assert (winner.config, winner.beats) == (("2",), True)


@pytest.mark.parametrize("repeat", [0, 1, 2])
def test_an_original_that_is_unknown(repeat: int) -> None:
    """Without the original's score there is no comparison and no further evaluation."""
    plan = halving("A=2,3")
    batches, results = run(plan, lambda e: None if (e.config, e.repeat) == (ORIGINAL, repeat) else value(e))
    assert (len(batches), plan.winner(results)) == (2 if repeat else 1, None)


def test_an_original_that_is_wrong() -> None:
    """The best remaining kernel wins without a comparison. If none is right, there is no winner."""
    plan = halving("A=2,3")
    _, results = run(plan, lambda entry: 0.0 if entry.config == ORIGINAL else value(entry))
    winner = won(plan, results)
    assert (winner.config, winner.beats, winner.compared) == (("3",), False, False)
    batches, results = run(plan, lambda _: 0.0)
    assert (len(batches), plan.winner(results)) == (1, None)


def test_a_large_space_is_sampled() -> None:
    """Optuna learns where scores are high, the number of samples holds, and no kernel is judged twice on a rung."""
    plan = halving("A=0..99", "B=0..99", trials=60)

    def score(entry: Entry) -> float:
        a, b = (1, 1) if entry.config == ORIGINAL else map(int, entry.config)
        return 1.0 + a + b

    batches, results = run(plan, score)
    first = [entry.config for batch in batches for entry in batch if entry.calls == 11]
    assert len(first) == len(set(first)) == 61
    sums = [score(one.entry) for one in results if one.entry.calls == 11]
    assert sum(sums[-28:]) / 28 > sum(sums[1:17]) / 16  # by Optuna, and at random
    assert run(plan, score)[0] == batches  # a resumed tuning chooses the same


def test_a_space_that_is_a_little_too_large_is_sampled_whole() -> None:
    """The last configurations are also found, and the original's values are not drawn again."""
    batches, _ = run(halving("A=0..32", trials=32), value)
    first = [entry.config for batch in batches for entry in batch if entry.calls == 11]
    assert sorted(first) == sorted([ORIGINAL, *((str(n),) for n in range(33) if n != 1)])


def test_importances_say_which_name_decides() -> None:
    plan = halving("A=1..8", "MODE=x,y,z")
    _, results = run(plan, lambda entry: 10.0 * value(entry))
    found = plan.importances(results)
    assert list(found) == ["A", "MODE"]
    assert sum(found.values()) == pytest.approx(1)
    assert found["A"] > 0.8
