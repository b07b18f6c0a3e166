"""Changes from one batch to another: broken, fixed, slower and faster kernels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from sqlalchemy import Engine, select

from kqueue.categories import Blame, Category
from kqueue.errors import InvalidRequest, UnknownEvaluation
from kqueue.store.evaluations import REAL
from kqueue.store.models import Evaluation, Verdict
from kqueue.store.reports.row import Row, select_of, view
from kqueue.store.sql import fetch

#: Maximum number of verdicts of a batch that is compared.
MOST: Final = 20_000


class Change(StrEnum):
    """The kinds of changes. Kernels are slower or faster if the intervals of their speedups do not overlap."""

    BROKE = "broke"
    FIXED = "fixed"
    SLOWER = "slower"
    FASTER = "faster"
    SAME = "same"
    WRONG = "wrong"
    """Wrong in both batches."""
    NOT_JUDGED = "not judged"
    """A verdict says nothing about the kernel: the fleet or the problem failed, or it was cancelled."""


@view(
    "evaluation_id problem_hash problem_label kernel_hash kernel_label category message"
    " speedup speedup_low speedup_high"
)
class Judged(Row):
    """The verdict of an evaluation of a batch."""

    category: Category
    message: str

    @property
    def merit(self) -> tuple[bool, bool, float, str]:
        """A key by which the best verdict comes last."""
        blame = self.category.blame
        return blame is Blame.NONE, blame is Blame.CANDIDATE, self.speedup or 0.0, str(self.evaluation_id)


@dataclass(frozen=True, slots=True)
class Pair:
    """The verdicts of two batches on the kernels of one label, or with ``label`` None on the best for a problem."""

    label: str | None
    first: Judged
    second: Judged

    @property
    def ratio(self) -> float | None:
        """The second speedup divided by the first. None for the same kernel, or if one of them is unknown."""
        if self.first.kernel_hash == self.second.kernel_hash or not self.first.speedup or not self.second.speedup:
            return None
        return self.second.speedup / self.first.speedup

    @property
    def change(self) -> Change:
        """The kind of change."""
        match self.first.category.blame, self.second.category.blame:
            case Blame.NONE, Blame.CANDIDATE:
                return Change.BROKE
            case Blame.CANDIDATE, Blame.NONE:
                return Change.FIXED
            case Blame.CANDIDATE, Blame.CANDIDATE:
                return Change.WRONG
            case Blame.NONE, Blame.NONE if self.first.kernel_hash != self.second.kernel_hash:
                if (self.second.speedup_high or math.inf) < (self.first.speedup_low or 0.0):
                    return Change.SLOWER
                faster = (self.first.speedup_high or math.inf) < (self.second.speedup_low or 0.0)
                return Change.FASTER if faster else Change.SAME
            case Blame.NONE, Blame.NONE:
                return Change.SAME
            case _:
                return Change.NOT_JUDGED


@dataclass(frozen=True, slots=True)
class Changes:
    """The pairs of two batches, and the numbers of problems that only one of them has."""

    pairs: Sequence[Pair]
    only_first: int
    only_second: int

    @property
    def counts(self) -> dict[Change, int]:
        """The number of pairs of each change that occurs."""
        found = [pair.change for pair in self.pairs]
        return {change: found.count(change) for change in Change if change in found}

    @property
    def mean(self) -> float | None:
        """The geometric mean of the ratios, or None without any."""
        logs = [math.log(ratio) for pair in self.pairs if (ratio := pair.ratio)]
        return math.exp(sum(logs) / len(logs)) if logs else None


def changes(engine: Engine, first: str, second: str) -> Changes:
    """Return the changes from the batch ``first`` to the batch ``second``.

    Kernels are paired by their labels where both batches use the same labels for a problem. Otherwise the best kernels
    for the problem are paired, which are the right ones with the highest speedups. Raise UnknownEvaluation if a batch
    has no verdict. Raise InvalidRequest if a batch is too large.
    """
    sides = _judged(engine, first), _judged(engine, second)
    before, after = ({(one.problem_hash, one.kernel_label) for one in side} for side in sides)
    olds, news = (_best(side, before & after) for side in sides)
    pairs = [Pair(key[1], olds[key], news[key]) for key in olds.keys() & news.keys()]
    pairs.sort(key=lambda pair: (pair.second.problem_label or "", pair.label or "", pair.second.problem_hash))
    old, new = ({one.problem_hash for one in side} for side in sides)
    return Changes(pairs, len(old - new), len(new - old))


def _judged(engine: Engine, batch: str) -> list[Judged]:
    query = select(*select_of(Judged, Verdict, Evaluation)).join(Evaluation, Evaluation.id == Verdict.evaluation_id)
    found = fetch(engine, Judged, query.where(Evaluation.batch == batch, REAL).limit(MOST + 1))
    if not found:
        raise UnknownEvaluation(batch, what="a verdict in the batch")
    if len(found) > MOST:
        raise InvalidRequest(f"{batch} has more than {MOST} verdicts, which is the limit of a comparison")
    return found


def _best(judged: Iterable[Judged], shared: set[tuple[str, str | None]]) -> dict[tuple[str, str | None], Judged]:
    """Return the best verdict on each shared label, and on each problem among the other verdicts."""
    best: dict[tuple[str, str | None], Judged] = {}
    for one in sorted(judged, key=lambda one: one.merit):
        key = (one.problem_hash, one.kernel_label)
        best[key if key in shared else (one.problem_hash, None)] = one
    return best
