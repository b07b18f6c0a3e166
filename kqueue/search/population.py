"""The kernels of a search that were judged: which are the best, and which are the next to make proposals from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import lru_cache
from typing import Final

from kqueue.search.plan import Algorithm

#: Expansions in a row that bring nothing new, after which a kernel is left alone.
_IN_VAIN: Final = 2


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel with known scores, of which more is better.

    Attributes:
        number: its proposal's number; the lower is the older.
        step: the step that it was proposed in.
        kernel: its source.
        scores: a score for each metric, in one order for all.
    """

    number: int
    step: int
    kernel: str
    scores: tuple[float, ...]


def fronts(candidates: Iterable[Candidate]) -> list[list[Candidate]]:
    """Return the candidates in Pareto fronts, the best first; within a front the oldest is first.

    None in the first front is worse than another in one score without being better in another. Without the first front
    the same holds for the second, and so on. With one metric a front is all that have the same score.
    """
    found: list[list[Candidate]] = []
    # Sorted so, a candidate is dominated by earlier ones only.
    for one in sorted(candidates, key=lambda c: c.scores, reverse=True):
        place = next((front for front in found if not any(_dominates(other, one) for other in front)), None)
        if place is None:
            found.append([one])
        else:
            place.append(one)
    return [sorted(front, key=lambda c: c.number) for front in found]


@dataclass(frozen=True, slots=True)
class Expansion:
    """A step's proposals from one kernel.

    Attributes:
        parent: the kernel's number.
        step: the step.
        new: False if all of them were kernels that had been proposed before.
    """

    parent: int
    step: int
    new: bool = True


def choose(
    algorithm: Algorithm,
    candidates: Sequence[Candidate],
    expansions: Iterable[Expansion],
    count: int,
    epsilon: float,
) -> list[Candidate]:
    """Return the kernels to make the next proposals from, at most ``count``.

    A kernel from which nothing new came twice in a row is left out while there are others: whoever is asked the same
    gives the same answer.

    Args:
        algorithm: how. Of equals, the one that had fewer proposals made from it is first, then the older.
        candidates: all kernels with known scores.
        expansions: what was made from which kernel so far, in the order of steps.
        count: the most to choose.
        epsilon: the largest distance of similar kernels.
    """
    done = list(expansions)
    times = Counter(one.parent for one in done)
    spent = _spent(done)
    candidates = [one for one in candidates if one.number not in spent] or candidates
    # The same source may have been proposed twice.
    unique = {one.kernel: one for one in sorted(candidates, key=lambda c: c.number, reverse=True)}
    ranks = {one.number: rank for rank, front in enumerate(fronts(unique.values())) for one in front}
    queue = sorted(unique.values(), key=lambda c: (ranks[c.number], times[c.number], c.number))
    if algorithm.spreads:
        queue = _by_regions(queue, ranks, done, epsilon)
    return queue[:count]


def _spent(expansions: Iterable[Expansion]) -> set[int]:
    """Return the kernels whose last expansions brought nothing new."""
    in_vain = Counter[int]()
    for one in expansions:
        in_vain[one.parent] = 0 if one.new else in_vain[one.parent] + 1
    return {number for number, times in in_vain.items() if times >= _IN_VAIN}


def distance(one: str, other: str) -> float:
    """Return the share of lines in which two sources differ: 0 for the same, 1 for nothing in common.

    Blank lines, comments and indentation do not count.
    """
    return 1.0 - SequenceMatcher(None, _lines(one), _lines(other), autojunk=False).ratio()


@lru_cache(maxsize=2_000_000)
def similar(one: str, other: str, epsilon: float) -> bool:
    """Return True if two sources differ in no larger share of their lines than ``epsilon``."""
    mine, theirs = _lines(one), _lines(other)
    some, others = _distinct(one), _distinct(other)
    # No order of the lines has more in common than this. Looking for the order takes a hundred times as long.
    most = len(some & others) + min(len(mine) - len(some), len(theirs) - len(others))
    total = len(mine) + len(theirs)
    return total - 2 * most <= epsilon * total and distance(one, other) <= epsilon


@lru_cache(maxsize=10_000)
def _lines(source: str) -> tuple[str, ...]:
    lines = (line.strip() for line in source.splitlines())
    return tuple(line for line in lines if line and not line.startswith("#"))


@lru_cache(maxsize=10_000)
def _distinct(source: str) -> frozenset[str]:
    return frozenset(_lines(source))


def _dominates(one: Candidate, other: Candidate) -> bool:
    return one.scores != other.scores and all(a >= b for a, b in zip(one.scores, other.scores, strict=True))


@dataclass(slots=True)
class _Region:
    """Similar kernels. The first is the best of them."""

    best: Candidate
    members: set[int] = field(default_factory=set[int])

    def stalls(self, expansions: Iterable[Expansion]) -> int:
        """The steps that made proposals from the region since its best was proposed."""
        return len({one.step for one in expansions if one.parent in self.members and one.step > self.best.step})


def _by_regions(
    queue: Sequence[Candidate], ranks: Mapping[int, int], expansions: Sequence[Expansion], epsilon: float
) -> list[Candidate]:
    """Return the best of each region: first where the fewest steps have passed in vain, then by rank."""
    regions: list[_Region] = []
    # A region is found anew in each step, so its centre is always the best that is known of it.
    for one in sorted(queue, key=lambda c: (ranks[c.number], c.number)):
        near = next((region for region in regions if similar(region.best.kernel, one.kernel, epsilon)), None)
        if near is None:
            regions.append(near := _Region(one))
        near.members.add(one.number)
    # Regions without a right kernel get no turn while others have one.
    right = [region for region in regions if any(score > 0 for score in region.best.scores)] or regions
    right.sort(key=lambda region: (region.stalls(expansions), ranks[region.best.number], region.best.number))
    return [region.best for region in right]
