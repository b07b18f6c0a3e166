"""Scores of verdicts by their metrics, and the choice of the best kernels and of the next parents by these scores.

Metrics are policies of :mod:`kqueue.integrations.common`, and functions of Python modules.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import lru_cache
from pathlib import Path
from typing import Final

from kqueue.contract import Verdict
from kqueue.errors import ConfigError, InvalidRequest
from kqueue.features.search.plan import Algorithm
from kqueue.integrations.common import scorer

Metric = Callable[[Verdict], float | None]


def metrics_of(names: Sequence[str], *, timed: bool) -> dict[str, Metric]:
    """Return the metrics with these names, which are policies or ``module:function``.

    Policies are described at :func:`~kqueue.integrations.common.scorer`. The working directory is searched for modules
    first. A function receives a :class:`~kqueue.Verdict` and returns a number (higher is better), or None if the
    kernel's quality is unknown.
    """
    if len(set(names)) != len(names):
        raise InvalidRequest("--metric: a metric is named twice")
    metrics = dict[str, Metric]()
    for name in names:
        if ":" in name:
            metrics[name] = _function(name)
            continue
        try:
            metrics[name] = scorer(name)  # pyright: ignore[reportArgumentType] a name that it refuses
        except ConfigError as error:
            raise InvalidRequest(f"--metric: {error}, as module:function") from None
        if not timed and name != "correctness":
            raise InvalidRequest(f"--metric {name}: needs times: omit --no-timing")
    return metrics


def scores_of(metrics: Mapping[str, Metric], verdict: Verdict) -> dict[str, float] | None:
    """Return the verdict's scores by the metrics' names, or None if one of them is unknown."""
    scores = dict[str, float]()
    for name, metric in metrics.items():
        score = metric(verdict)
        if score is None:
            return None
        scores[name] = score
    return scores


def _function(name: str) -> Metric:
    module, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function: object = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, SyntaxError, ValueError) as error:
        raise InvalidRequest(f"--metric {name}: {error}: give module:function") from None
    if not callable(function):
        raise InvalidRequest(f"--metric {name}: not a function")

    def guarded(verdict: Verdict) -> float | None:
        try:
            score: object = function(verdict)
        except Exception as error:
            raise InvalidRequest(f"--metric {name}: raised {type(error).__name__}: {error}") from error
        if score is None:
            return None
        if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
            raise InvalidRequest(f"--metric {name}: returned {score!r}: return a finite number or None")
        return float(score)

    return guarded


#: Consecutive expansions without a new kernel after which a kernel is no longer expanded.
_FRUITLESS: Final = 2


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel with known scores, in one order of the metrics for all candidates. Higher scores are better.

    Older proposals have lower numbers.
    """

    number: int
    step: int
    kernel: str
    scores: tuple[float, ...]


def fronts(candidates: Iterable[Candidate]) -> list[list[Candidate]]:
    """Return the candidates in Pareto fronts, the best first. Within a front the oldest is first.

    No candidate of the first front is worse than another one in a score without being better in another score. Without
    the first front, the same holds for the second, and so on. With one metric, a front has equal scores.
    """
    result: list[list[Candidate]] = []
    # In this order, only earlier candidates can dominate a candidate.
    for one in sorted(candidates, key=lambda c: c.scores, reverse=True):
        target = next((front for front in result if not any(_dominates(other, one) for other in front)), None)
        if target is None:
            result.append([one])
        else:
            target.append(one)
    return [sorted(front, key=lambda c: c.number) for front in result]


@dataclass(frozen=True, slots=True)
class Expansion:
    """A step's proposals from one kernel. ``new`` is False if all of them had been proposed before."""

    parent: int
    step: int
    new: bool = True


def choose(
    algorithm: Algorithm, candidates: Sequence[Candidate], expansions: Iterable[Expansion], count: int, epsilon: float
) -> list[Candidate]:
    """Return the kernels to make the next proposals from, at most ``count``.

    Of equals, the one with fewer proposals is first, then the older one. A kernel that gave nothing new twice in a row
    is omitted while there are other kernels, because a proposer tends to give the same answer to the same question.
    The ``expansions`` are in the order of steps.
    """
    done = list(expansions)
    times = Counter(one.parent for one in done)
    fruitless = Counter[int]()
    for one in done:
        fruitless[one.parent] = 0 if one.new else fruitless[one.parent] + 1
    candidates = [one for one in candidates if fruitless[one.number] < _FRUITLESS] or candidates
    # The same source can have been proposed twice.
    unique = {one.kernel: one for one in sorted(candidates, key=lambda c: c.number, reverse=True)}
    ranks = {one.number: rank for rank, front in enumerate(fronts(unique.values())) for one in front}
    queue = sorted(unique.values(), key=lambda c: (ranks[c.number], times[c.number], c.number))
    if algorithm.spreads:
        queue = _by_regions(queue, ranks, done, epsilon)
    return queue[:count]


def distance(one: str, other: str) -> float:
    """Return the share of lines in which two sources differ: 0 for equal sources, 1 for no common lines.

    Blank lines, comments and indentation do not count.
    """
    return 1.0 - SequenceMatcher(None, _lines(one), _lines(other), autojunk=False).ratio()


@lru_cache(maxsize=2_000_000)
def similar(one: str, other: str, epsilon: float) -> bool:
    """Return True if the share of lines in which two sources differ is at most ``epsilon``."""
    mine, theirs = _lines(one), _lines(other)
    unique_mine, unique_theirs = _distinct(one), _distinct(other)
    # Upper bound for any order of the lines. Comparing the order takes a hundred times as long.
    most = len(unique_mine & unique_theirs) + min(len(mine) - len(unique_mine), len(theirs) - len(unique_theirs))
    total = len(mine) + len(theirs)
    return total - 2 * most <= epsilon * total and distance(one, other) <= epsilon


@lru_cache(maxsize=10_000)
def _lines(source: str) -> tuple[str, ...]:
    return tuple(line for line in map(str.strip, source.splitlines()) if line and not line.startswith("#"))


@lru_cache(maxsize=10_000)
def _distinct(source: str) -> frozenset[str]:
    return frozenset(_lines(source))


def _dominates(one: Candidate, other: Candidate) -> bool:
    return one.scores != other.scores and all(a >= b for a, b in zip(one.scores, other.scores, strict=True))


@dataclass(slots=True)
class _Region:
    """A region of similar kernels around the best of them."""

    best: Candidate
    members: set[int] = field(default_factory=set[int])

    def stalls(self, expansions: Iterable[Expansion]) -> int:
        """Return the number of steps that expanded the region since its best kernel was proposed."""
        return len({one.step for one in expansions if one.parent in self.members and one.step > self.best.step})


def _by_regions(
    queue: Sequence[Candidate], ranks: Mapping[int, int], expansions: Sequence[Expansion], epsilon: float
) -> list[Candidate]:
    """Return the best kernel of each region, sorted by steps without improvement, then by rank."""
    regions: list[_Region] = []
    # Regions are rebuilt in each step, so the centre of each is always its best known kernel.
    for one in sorted(queue, key=lambda c: (ranks[c.number], c.number)):
        near = next((region for region in regions if similar(region.best.kernel, one.kernel, epsilon)), None)
        if near is None:
            regions.append(near := _Region(one))
        near.members.add(one.number)
    # Regions without a correct kernel wait while there are regions with one.
    right = [region for region in regions if any(score > 0 for score in region.best.scores)] or regions
    right.sort(key=lambda region: (region.stalls(expansions), ranks[region.best.number], region.best.number))
    return [region.best for region in right]
