"""Duels: is kernel B faster than kernel A on a problem, by how much, and with what certainty.

A duel is a series of rounds. A round judges A and B once each, in random order, every time in fresh processes, because
two processes of the same kernel differ by the placement of their memory. Each evaluation times its kernel in turn with
the reference, so clocks, heat and neighbours cancel in a round's value, ``log(speedup of B / speedup of A)``. After
growing numbers of rounds two tests look at these values, and a winner needs both. The t-test measures the difference
and its interval. Values of two kinds, such as the first and the second one of each round, can mislead it, so the sign
test must agree, which is exact for every distribution because the order is random. It suffices where all rounds agree,
and the interval then reaches from the least to the largest value. The looks share an error of
:data:`ERROR`, so a duel can end at any of them, and two equal kernels get a winner in at most that fraction of duels.

The state of a duel follows from its verdicts and its id alone, so a fleet needs no record of duels: the evaluations of
one are a batch, ``duel-`` and the id, whose evaluations 2n and 2n + 1 are round n.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from typing import Any, Final, Literal, Self
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, computed_field

from kqueue.categories import Blame, Category
from kqueue.contract import Request, Result
from kqueue.errors import InvalidRequest

#: Probability of a winner between two equal kernels, over all looks of a duel.
ERROR: Final = 0.02
#: Number of rounds before the first look, and the factor from one look to the next.
_FIRST, _GROWTH = 10, 1.42
#: Reason of a void round whose kernel passed without being timed, which would not change.
_UNTIMED: Final = "not timed"
#: Number of void rounds at which a duel ends if most rounds are void.
_VOID: Final = 6
#: Number of rounds after which a duel ends, and the range of that number. With fewer rounds no sign test decides.
MOST: Final = 40
_FEWEST, _LIMIT = 7, 100
#: Beginning of the names of duels' batches, and the pattern of the ids after it: digits, ``most``, ``within``.
BATCH: Final = "duel-"
ID: Final = re.compile(r"[0-9a-f]{12}-([1-9]\d{0,2})(?:-(0\.\d{6}))?")

#: The reasons for the end of a duel.
Reason = Literal["faster", "failed", "equal", "rounds", "void", "both_failed", "problem", "cancelled"]


@dataclass(frozen=True, slots=True)
class Trial:
    """The part of a verdict that counts in a duel.

    ``clock`` is the clock of the time, and ``device`` the model of the device, None for a local judge. ``interval`` is
    the speedup's, or None if it is unknown. ``outside`` is the speedup by the judge's clock, or None.
    """

    category: Category
    speedup: float | None
    clock: tuple[str, bool] | None
    device: str | None
    label: str | None = None
    interval: tuple[float, float] | None = None
    outside: float | None = None

    @classmethod
    def of(cls, result: Result) -> Self:
        """Return the trial of an outcome or a verdict."""
        environment = getattr(result, "environment", None)
        clock = None if result.runtime is None else (result.runtime.basis, result.runtime.is_fine)
        device, label = environment and environment.device, getattr(result, "kernel_label", None)
        outside = result.evidence.judge_speedup if clock is not None and clock[1] else result.speedup
        return cls(result.category, result.speedup, clock, device, label, result.speedup_interval, outside)


class Duel(BaseModel):
    """The state of a duel."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    id: str = ""
    """The duel's id. Its evaluations are the batch `duel-` and the id."""
    winner: Literal["a", "b"] | None = None
    """The winner, null if there is none or none yet."""
    reason: Reason | None = None
    """The reason for its end, null while it runs. `faster`: the winner is faster. `failed`: only the winner passed.
    `equal`: the interval is within the limit. `rounds`: no decision in all rounds. `void`: most rounds are void, or a
    kernel is never timed.
    `both_failed`, `problem` (it failed) and `cancelled`: no kernel can win."""
    ratio: float | None = None
    """Speed of B divided by the speed of A at the last look. Above 1 B is faster."""
    interval: tuple[float, float] | None = None
    """The ratio's interval, of 98 % over all looks together."""
    certainty: float | None = None
    """Certainty of a decision by times: 1 minus the probability of an error over all looks."""
    rounds: int = 0
    """Number of rounds with a value."""
    voids: dict[str, int] = {}
    """Numbers of rounds without one, by reason: a category, `not timed`, which ends the duel, `no time`, `other
    device`, or `other clock`, if no clock timed both kernels and the intervals of their speedups overlap."""
    most: int = MOST
    """Number of rounds with a value at which the duel ends."""
    due: int = 0
    """Number of rounds to submit next, 0 while some are being judged."""
    a_label: str | None = None
    b_label: str | None = None
    a_failed: Category | None = None
    """Category of A's failure, null if it has not failed."""
    b_failed: Category | None = None

    @computed_field
    @property
    def message(self) -> str:
        """The state in one line."""
        measured = f"{self.rounds} rounds" if self.reason else f"{self.rounds} of at most {self.most} rounds"
        measured += "".join(f", {number} void ({why})" for why, number in self.voids.items())
        if self.ratio is not None and self.interval is not None:
            low, high = self.interval
            measured = f"B has {self.ratio:.4g} times the speed of A ({low:.4g} to {high:.4g}), {measured}"
        failed = " and ".join(f"{n} ended as {c}" for n, c in (("A", self.a_failed), ("B", self.b_failed)) if c)
        sure, name = f"certainty {100 * (self.certainty or 0):.4g} %", (self.winner or "").upper()
        return {
            None: f"undecided: {measured}",
            "faster": f"{name} is faster, {sure}: {measured}",
            "failed": f"{name} wins, because {failed}",
            "equal": f"equal within the limit, {sure}: {measured}",
            "rounds": f"no decision: {measured}",
            "void": f"no decision, because most rounds had no comparable times: {measured}{self._advice}",
            "both_failed": f"no winner, because {failed}",
            "problem": "no winner, because the problem failed",
            "cancelled": f"cancelled: {measured}",
        }[self.reason]

    def _repr_html_(self) -> str:
        from kqueue.notebook import to_html

        return to_html(f"A is {self.a_label}, B is {self.b_label}\n{self.message}")

    @property
    def _advice(self) -> str:
        """The remedy if a kernel is not timed, or if the kernels were timed by two clocks. Else empty."""
        if _UNTIMED in self.voids:
            return ". A kernel that passed is never timed here, and its verdict says why. Choose another lane or device"
        if "other clock" not in self.voids:
            return ""
        return ". Try a less busy machine, or larger inputs: from 0.5 ms on a GPU, 5 ms on a CPU, one clock times both"


def state(
    trials: Sequence[tuple[Trial | None, Trial | None]], *, within: float | None = None, most: int = MOST
) -> Duel:
    """Return the state of a duel from its rounds, each with the trials of A and B. None stands for a missing verdict.

    A duel ends as ``equal`` when the interval of the ratio is within ``1 / (1 + within)`` and ``1 + within``, and at
    the latest after ``most`` rounds.
    """
    sides = [[trial for pair in trials if (trial := pair[side]) is not None] for side in (0, 1)]
    ended = [[trial.category for trial in of] for of in sides]
    failed = [next((one for one in of if one.blame is Blame.CANDIDATE), None) for of in ended]
    # A look counts rounds in their order, whichever verdict comes first.
    complete = list(takewhile(lambda pair: None not in pair, trials))
    every = [value_of(*pair) for pair in complete]
    values = [value for value in every if not isinstance(value, str)]
    counts, voids = looks(most), Counter(value for value in every if isinstance(value, str))
    found: dict[str, Any] = {"rounds": len(values), "voids": dict(voids), "most": most}
    for name, of, category in zip("ab", sides, failed, strict=True):
        found |= {f"{name}_failed": category, f"{name}_label": next((one.label for one in of), None)}
    for count in counts:
        if "reason" not in found and count <= len(values):
            found |= _look(values[:count], len(counts), within)
    over = [
        winner for winner in (0, 1) if failed[1 - winner] and not failed[winner] and Category.PASSED in ended[winner]
    ]
    if over or all(failed):
        end = {"reason": "failed" if over else "both_failed", "winner": "ab"[over[0]] if over else None}
        found |= {**end, "certainty": None}
    elif any(one.blame is Blame.PROBLEM for of in ended for one in of):
        found |= {"reason": "problem", "winner": None, "certainty": None}
    elif "reason" in found:
        pass
    elif any(Category.CANCELLED in of for of in ended):
        found["reason"] = "cancelled"
    elif len(values) >= most:
        found["reason"] = "rounds"
    elif _UNTIMED in voids or (voids.total() >= _VOID and voids.total() > len(values)):
        found["reason"] = "void"
    elif not trials:
        found["due"] = 1  # shows whether both kernels are right, before more rounds are submitted
    elif len(complete) == len(trials):
        found["due"] = next(count for count in counts if count > len(values)) - len(values)
    return Duel(**found)


@dataclass(frozen=True, slots=True)
class Match:
    """Two kernels that fight a duel. The requests differ in kernel, backend and label at most.

    The id contains ``most`` and ``within``.
    """

    a: Request
    b: Request
    id: str

    @classmethod
    def of(
        cls, a: Request, b: Request, *, within: float | None = None, most: int = MOST, key: str | None = None
    ) -> Self:
        """Return a new duel of two requests, whose batch, key and reuse are ignored. ``key`` determines its id.

        Raise InvalidRequest if the requests cannot be compared, or an option is out of range.
        """
        own = {"kernel", "trees", "backend", "kernel_label", "batch", "idempotency_key", "reuse"}
        if a.model_dump(exclude=own) != b.model_dump(exclude=own):
            raise InvalidRequest("b: only kernel, trees, backend and kernel_label can differ from a's")
        if not a.settings.timing.enabled:
            raise InvalidRequest("settings.timing.purpose: a duel compares times: choose another one than check")
        if not _FEWEST <= most <= _LIMIT:
            raise InvalidRequest(f"rounds: give {_FEWEST} to {_LIMIT}, not {most}")
        if within is not None and not 1e-6 <= within < 1:
            raise InvalidRequest(f"within: give a part such as 0.01 for 1 %, below 1, not {within:g}")
        digits = uuid4().hex if key is None else hashlib.sha256(key.encode()).hexdigest()
        return cls(a, b, f"{digits[:12]}-{most}" + ("" if within is None else f"-{within:.6f}"))

    def requests(self, start: int, number: int) -> list[Request]:
        """Return the requests of ``number`` rounds from round ``start`` on, two for each round, in random order.

        Their idempotency keys make a repeated submission harmless. They omit the options, so a duel's key has one duel.
        """
        return [
            (self.a, self.b)[side].model_copy(
                update={
                    "batch": BATCH + self.id,
                    "reuse": False,
                    "idempotency_key": f"{BATCH}{self.id[:12]}/{one}/{'ab'[side]}",
                }
            )
            for one in range(start, start + number)
            for side in order(self.id, one)
        ]

    def state(self, results: Sequence[Result | None]) -> Duel:
        """Return the state after the results of :meth:`requests`, in the order of the requests from round 0 on."""
        now = state_of(self.id, [None if result is None else Trial.of(result) for result in results])
        return now.model_copy(update={"a_label": self.a.kernel_label, "b_label": self.b.kernel_label})


def order(identity: str, number: int) -> tuple[int, int]:
    """Return the order of A (0) and B (1) in a round. It is random, but follows from the id."""
    first = hashlib.sha256(f"{identity}/{number}".encode()).digest()[0] & 1
    return first, 1 - first


def state_of(identity: str, trials: Sequence[Trial | None]) -> Duel:
    """Return the state of a duel from its trials, in the order of :meth:`Match.requests`.

    Raise InvalidRequest if no duel can have this id.
    """
    if (found := ID.fullmatch(identity)) is None:
        raise InvalidRequest("duel: an id of a duel is expected")
    rounds: list[tuple[Trial | None, Trial | None]] = []
    for number in range((len(trials) + 1) // 2):
        first, second = (*trials[2 * number : 2 * number + 2], None)[:2]
        rounds.append((first, second) if order(identity, number) == (0, 1) else (second, first))
    now = state(rounds, within=float(found[2]) if found[2] else None, most=int(found[1]))
    return now.model_copy(update={"id": identity})


def duel(evaluate: Callable[[list[Request]], Iterable[Result | InvalidRequest]], match: Match) -> Iterator[Duel]:
    """Fight a duel, and yield its state after each result. The last one has a reason.

    ``evaluate`` returns or yields the results of requests in their order, such as ``LocalJudge.map`` and
    ``Client.evaluate_batch``. It gets all rounds up to the next look at once. Results that it yields one by one are
    taken until the duel ends. Raise InvalidRequest if a request was refused.
    """
    results: list[Result | None] = []
    now = match.state(results)
    while now.reason is None:
        done, requests = len(results), match.requests(len(results) // 2, now.due)
        results += [None] * len(requests)
        for index, answer in zip(range(done, len(results)), evaluate(requests), strict=True):
            if isinstance(answer, InvalidRequest):
                raise answer
            results[index] = answer
            now = match.state(results)
            yield now
            if now.reason is not None:
                break


@cache
def looks(most: int) -> tuple[int, ...]:
    """Return the numbers of rounds after which the test looks: 10, 14, 20, 28, 40 for 40 rounds."""
    counts: list[int] = []
    count = _FIRST
    while count < most:
        counts.append(count)
        count = round(count * _GROWTH)
    return (*counts, most)


@cache
def critical(freedom: int, error: float) -> float:
    """Return the value that the size of Student's t exceeds with probability ``error``."""
    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if exceeds(middle, freedom) > error else (low, middle)
    return high


def exceeds(t: float, freedom: int) -> float:
    """Return the probability that the size of Student's t exceeds ``t``, by the finite series for whole degrees."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * cosine**2
    inside = 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
    return max(0.0, 1 - inside)


def _look(values: Sequence[float], number: int, within: float | None) -> dict[str, Any]:
    """Return the fields of a duel's state at one of ``number`` looks, each with the same part of :data:`ERROR`."""
    freedom = len(values) - 1
    mean = sum(values) / len(values)
    error = math.sqrt(sum((value - mean) ** 2 for value in values) / freedom / len(values))
    half = critical(freedom, ERROR / number) * error
    found: dict[str, Any] = {"ratio": math.exp(mean), "interval": (math.exp(mean - half), math.exp(mean + half))}
    if within is not None and abs(mean) + half <= math.log1p(within):
        return found | {"reason": "equal", "certainty": 1 - ERROR}
    against = sum(value * mean <= 0 for value in values)
    wrong = sum(math.comb(len(values), count) for count in range(against + 1)) / 2**freedom
    if (abs(mean) > half or not against) and number * wrong <= ERROR:
        if abs(mean) > half:
            wrong = max(wrong, exceeds(abs(mean) / error, freedom) if error else 0.0)
        else:
            found["interval"] = (math.exp(min(values)), math.exp(max(values)))
        return found | {"reason": "faster", "certainty": 1 - number * wrong, "winner": "b" if mean > 0 else "a"}
    return found


def value_of(a: Trial | None, b: Trial | None) -> float | str:
    """Return the value of a round, ``log(speedup of B / speedup of A)``, or the reason why it is void."""
    assert a is not None
    assert b is not None
    if lost := [one.category for one in (a, b) if one.category is not Category.PASSED]:
        return str(lost[0])
    if a.clock is None or b.clock is None:
        return _UNTIMED
    if a.speedup is None or b.speedup is None:
        return "no time"
    if a.device != b.device:
        return "other device"
    if a.clock == b.clock:
        return math.log(b.speedup / a.speedup)
    if a.clock[0] == b.clock[0] and a.outside is not None and b.outside is not None:
        return math.log(b.outside / a.outside)  # A kernel could stop its own clock.
    # Two clocks can have different errors, so the round counts with the smallest difference that both intervals allow.
    if a.interval is not None and b.interval is not None:
        if b.interval[0] > a.interval[1]:
            return math.log(b.interval[0] / a.interval[1])
        if a.interval[0] > b.interval[1]:
            return math.log(b.interval[1] / a.interval[0])
    return "other clock"
