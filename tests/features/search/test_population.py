"""Selection of the best and the next kernels."""

from __future__ import annotations

import random

import pytest

from kqueue.features.search.plan import Algorithm
from kqueue.features.search.population import Candidate, Expansion, choose, distance, fronts, similar


def candidate(number: int, *scores: float, kernel: str | None = None, step: int = 0) -> Candidate:
    return Candidate(number, step, kernel if kernel is not None else f"kernel {number}", scores)


def numbers(
    algorithm: Algorithm, candidates: list[Candidate], expanded: list[tuple[int, int]], count: int
) -> list[int]:
    expansions = [Expansion(parent, step) for parent, step in expanded]
    return [one.number for one in choose(algorithm, candidates, expansions, count, epsilon=0.25)]


def test_one_metric_makes_a_front_for_each_score() -> None:
    """Fronts are ordered by score, and equal kernels by age."""
    found = fronts([candidate(1, 2.0), candidate(2, 3.0), candidate(3, 2.0)])
    assert [[one.number for one in front] for front in found] == [[2], [1, 3]]


def test_fronts_are_what_their_definition_says() -> None:
    """With random scores, no kernel dominates within its front, and each is dominated from the front before."""
    chance = random.Random(7)
    some = [candidate(n, chance.randrange(5), chance.randrange(5), chance.randrange(5)) for n in range(200)]

    def dominates(a: Candidate, b: Candidate) -> bool:
        return a.scores != b.scores and all(x >= y for x, y in zip(a.scores, b.scores, strict=True))

    found = fronts(some)
    assert sorted(one.number for front in found for one in front) == list(range(200))
    for before, front in zip([None, *found], found, strict=False):
        assert not any(dominates(a, b) for a in front for b in front)
        assert before is None or all(any(dominates(a, b) for a in before) for b in front)


def test_the_best_are_next_and_of_equals_the_least_tried() -> None:
    """A kernel that was proposed twice counts once."""
    some = [candidate(0, 1.0), candidate(1, 2.0), candidate(2, 2.0), candidate(3, 2.0, kernel="kernel 1")]
    assert numbers(Algorithm.PS, some, [], 4) == [1, 2, 0]
    assert numbers(Algorithm.PS, some, [(1, 2)], 1) == [2]


@pytest.mark.parametrize("algorithm", Algorithm)
def test_a_kernel_from_which_nothing_new_comes_is_left_alone(algorithm: Algorithm) -> None:
    """Two successive steps without news exclude a kernel. If all are excluded, the best is chosen again."""
    some = [candidate(0, 2.0), candidate(1, 1.0)]

    def first(*new: bool, of: int = 0) -> int:
        expansions = [Expansion(of, 1 + step, one) for step, one in enumerate(new)]
        if algorithm.spreads:  # more steps in vain from the other kernel
            expansions += [Expansion(1 - of, 10 + step) for step in range(5)]
        return choose(algorithm, some, expansions, 1, epsilon=0.25)[0].number

    assert first(False) == 0
    assert first(False, False) == 1
    assert first(False, True, False) == 0
    assert choose(algorithm, some[:1], [Expansion(0, 1, False), Expansion(0, 2, False)], 1, 0.25)[0].number == 0


def lines(*changed: int) -> str:
    return "\n".join(f"line {n}{' changed' if n in changed else ''}" for n in range(8))


def test_distance_is_the_share_of_lines() -> None:
    """Comments, blank lines and indentation do not count."""
    assert distance(lines(), lines()) == 0.0
    assert distance(lines(), lines(1)) == pytest.approx(1 / 8)
    assert distance(lines(), f"# a comment\n\n    {lines()}") == 0.0
    assert distance("a", "b") == 1.0


def test_similar_is_what_distance_says() -> None:
    """This includes sources with reordered and repeated lines."""
    chance = random.Random(3)
    sources = ["\n".join(chance.choices("abcdef", k=chance.randrange(12))) for _ in range(60)]
    for one in sources:
        for other in sources:
            for epsilon in (0.0, 0.3, 0.6):
                assert similar(one, other, epsilon) is (distance(one, other) <= epsilon)


def test_similar_kernels_share_a_place() -> None:
    """The net has the best kernel of each region, so two of one region are not chosen together."""
    some = [candidate(0, 5.0, kernel=lines()), candidate(1, 4.0, kernel=lines(3)), candidate(2, 1.0, kernel="other")]
    assert numbers(Algorithm.PS, some, [], 2) == [0, 1]
    assert numbers(Algorithm.PS_EPSNET, some, [], 2) == [0, 2]


def test_a_region_without_progress_waits() -> None:
    """Steps without progress count since the region's best, and a better kernel moves the region to the front."""
    some = [candidate(0, 5.0, kernel=lines()), candidate(1, 1.0, kernel="other", step=1)]
    assert numbers(Algorithm.PS_EPSNET, some, [(0, 1)], 1) == [1]
    assert numbers(Algorithm.PS_EPSNET, some, [(0, 1), (1, 2)], 1) == [0]
    assert numbers(Algorithm.PS_EPSNET, [*some, candidate(2, 6.0, kernel=lines(2), step=1)], [(0, 1)], 1) == [2]


def test_a_region_of_failures_waits_for_a_right_kernel() -> None:
    """Its turn comes only when no other region is left."""
    failed = candidate(1, 0.0, kernel="other")
    assert numbers(Algorithm.PS_EPSNET, [candidate(0, 5.0), failed], [(0, 1), (0, 2)], 2) == [0]
    assert numbers(Algorithm.PS_EPSNET, [failed], [], 2) == [1]
