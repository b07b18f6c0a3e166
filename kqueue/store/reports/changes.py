"""Changes from one batch to another: broken, fixed, slower and faster kernels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final
from uuid import UUID

from sqlalchemy import Engine, select

from kqueue.categories import Blame, Category
from kqueue.errors import InvalidRequest, UnknownEvaluation
from kqueue.store.evaluations import REAL
from kqueue.store.models import Evaluation, Verdict
from kqueue.store.reports.listing import INTERVAL
from kqueue.store.sql import columns, fetch

#: Maximum number of verdicts of a batch that is compared.
MOST: Final = 20_000


class Change(StrEnum):
    """The kinds of changes, in the order in which they are listed."""

    BROKE = "broke"
    """Right in the first batch, and wrong in the second."""
    FIXED = "fixed"
    """Wrong in the first batch, and right in the second."""
    SLOWER = "slower"
    """Right in both, and the intervals of the speedups do not overlap."""
    FASTER = "faster"
    SAME = "same"
    """Right in both, and no certain difference of the speedups."""
    WRONG = "wrong"
    """Wrong in both."""
    NOT_JUDGED = "not judged"
    """A verdict that says nothing about the kernel: the fleet or the problem failed, or it was cancelled."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The verdict of an evaluation of a batch."""

    evaluation_id: UUID
    problem_hash: str
    problem_label: str | None
    kernel_label: str | None
    category: Category
    message: str
    speedup: float | None
    speedup_low: float | None
    speedup_high: float | None


@dataclass(frozen=True, slots=True)
class Pair:
    """The results of both batches for a problem, or for the kernels of one label for it.

    Attributes:
        kernel_label: the label. None if the best kernels of each batch for the problem are compared.
        ratio: the second speedup divided by the first. None if either is unknown.
        message: the message of the second batch's verdict.
    """

    change: Change
    problem_hash: str
    problem_label: str | None
    kernel_label: str | None
    ratio: float | None
    first_id: UUID
    first_category: Category
    first_speedup: float | None
    second_id: UUID
    second_category: Category
    second_speedup: float | None
    message: str


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes from one batch to another.

    Attributes:
        pairs: problems and labels that both batches have, ordered by change, then by ratio.
        only_first, only_second: the number of problems that only one batch has.
        mean: the geometric mean of the ratios, or None without any.
    """

    pairs: Sequence[Pair]
    only_first: int
    only_second: int
    mean: float | None

    @property
    def counts(self) -> dict[Change, int]:
        """The number of pairs of each change that occurs."""
        counted = {change: sum(pair.change is change for pair in self.pairs) for change in Change}
        return {change: number for change, number in counted.items() if number}


#: Name of a pair: the problem's hash, and the label or None.
_Key = tuple[str, str | None]


def changes(engine: Engine, first: str, second: str) -> Changes:
    """Return the changes from the batch ``first`` to the batch ``second``.

    Kernels are paired by their labels where both batches use the same labels for a problem. Otherwise the best kernels
    for the problem are paired. The best kernel is the right one with the highest speedup.

    Raises:
        UnknownEvaluation: a batch has no verdict.
        InvalidRequest: a batch is too large.
    """
    before, after = _ended(engine, first), _ended(engine, second)
    shared = {(one.problem_hash, one.kernel_label) for one in before} & {
        (one.problem_hash, one.kernel_label) for one in after
    }
    olds, news = _best(before, shared), _best(after, shared)
    order = list(Change)
    pairs = sorted(
        (_pair(key, olds[key], news[key]) for key in olds.keys() & news.keys()),
        key=lambda pair: (order.index(pair.change), pair.ratio or math.inf, pair.problem_label or "", pair.first_id),
    )
    ratios = [math.log(pair.ratio) for pair in pairs if pair.ratio]
    problems = [{one.problem_hash for one in side} for side in (before, after)]
    return Changes(
        pairs,
        len(problems[0] - problems[1]),
        len(problems[1] - problems[0]),
        math.exp(sum(ratios) / len(ratios)) if ratios else None,
    )


def _ended(engine: Engine, batch: str) -> list[Ended]:
    query = (
        select(*columns(Ended, Verdict, Evaluation, **INTERVAL))
        .join(Evaluation, Evaluation.id == Verdict.evaluation_id)
        .where(Evaluation.batch == batch, REAL)
        .limit(MOST + 1)
    )
    found = fetch(engine, Ended, query)
    if not found:
        raise UnknownEvaluation(batch, what="the batch, or a verdict in it")
    if len(found) > MOST:
        raise InvalidRequest(f"{batch} has more than {MOST} verdicts, which is the limit of a comparison")
    return found


def _best(ended: Iterable[Ended], shared: set[_Key]) -> Mapping[_Key, Ended]:
    """Return the best result of each shared label, and of each problem among the other ones."""
    best: dict[_Key, Ended] = {}
    for one in ended:
        key = (one.problem_hash, one.kernel_label)
        key = key if key in shared else (one.problem_hash, None)
        if key not in best or _merit(one) > _merit(best[key]):
            best[key] = one
    return best


def _merit(one: Ended) -> tuple[bool, bool, float, str]:
    blame = one.category.blame
    return blame is Blame.NONE, blame is Blame.CANDIDATE, one.speedup or 0.0, str(one.evaluation_id)


def _pair(key: _Key, old: Ended, new: Ended) -> Pair:
    return Pair(
        change=_change(old, new),
        problem_hash=key[0],
        problem_label=new.problem_label or old.problem_label,
        kernel_label=key[1],
        ratio=new.speedup / old.speedup if old.speedup and new.speedup else None,
        first_id=old.evaluation_id,
        first_category=old.category,
        first_speedup=old.speedup,
        second_id=new.evaluation_id,
        second_category=new.category,
        second_speedup=new.speedup,
        message=new.message,
    )


def _is_below(high: float | None, low: float | None) -> bool:
    """Return True if the end of an interval is known to lie below the beginning of another one."""
    return high is not None and low is not None and high < low


def _change(old: Ended, new: Ended) -> Change:
    blames = old.category.blame, new.category.blame
    match blames:
        case (Blame.NONE, Blame.CANDIDATE):
            return Change.BROKE
        case (Blame.CANDIDATE, Blame.NONE):
            return Change.FIXED
        case (Blame.CANDIDATE, Blame.CANDIDATE):
            return Change.WRONG
        case (Blame.NONE, Blame.NONE):
            if _is_below(new.speedup_high, old.speedup_low):
                return Change.SLOWER
            return Change.FASTER if _is_below(old.speedup_high, new.speedup_low) else Change.SAME
        case _:
            return Change.NOT_JUDGED
