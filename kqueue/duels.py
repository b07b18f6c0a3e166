"""Duels: is kernel B faster than kernel A on a problem, by how much, and with what certainty.

A duel is a series of rounds. A round judges A and B once each, in random order, every time in fresh processes, because
two processes of the same kernel differ by the placement of their memory. Each evaluation times its kernel in turn with
the reference, so clocks, heat and neighbours cancel in a round's value, ``log(speedup of B / speedup of A)``. After
growing numbers of rounds a t-test looks at these values. The looks share an error of :data:`ERROR`, so a duel can end
at any of them, and two equal kernels get a winner in at most that fraction of duels.

The state of a duel follows from its verdicts and its id alone, so a fleet needs no record of duels: the evaluations of
one are a batch, ``duel-`` and the id, whose evaluations 2n and 2n + 1 are round n.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import takewhile
from typing import Any, Final, Literal, Self
from uuid import uuid4

from kqueue.categories import Blame, Category
from kqueue.contract import Request, Result
from kqueue.errors import InvalidRequest

#: Probability of a winner between two equal kernels, over all looks of a duel.
ERROR: Final = 0.02
#: Number of rounds before the first look, and the factor from one look to the next.
_FIRST, _GROWTH = 6, 1.45
#: Number of rounds after which a duel ends, and the range of that number.
MOST: Final = 40
_FEWEST, _LIMIT = 3, 400
#: Beginning of the names of duels' batches.
_BATCH: Final = "duel-"
_ID: Final = re.compile(r"[0-9a-f]{12}-(\d{1,3})(?:-(0\.\d{1,6}|1e-0[56]))?")

#: The reasons for the end of a duel.
Reason = Literal["faster", "failed", "equal", "rounds", "void", "both_failed", "problem", "cancelled"]


@dataclass(frozen=True, slots=True)
class Trial:
    """The part of a verdict that counts in a duel.

    ``clock`` is the clock of the time, and ``device`` the model of the device, None for a local judge.
    """

    category: Category
    speedup: float | None
    clock: tuple[str, bool] | None
    device: str | None

    @classmethod
    def of(cls, result: Result) -> Self:
        """Return the trial of an outcome or a verdict."""
        environment = getattr(result, "environment", None)
        clock = None if result.runtime is None else (result.runtime.basis, result.runtime.is_fine)
        return cls(result.category, result.speedup, clock, environment and environment.device)


@dataclass(frozen=True, slots=True)
class Duel:
    """The state of a duel.

    Attributes:
        winner: ``a`` or ``b``. None if there is none (yet).
        reason: the reason why the duel ended, None while it runs. ``faster``: one kernel is. ``failed``: only the
            winner passed. ``equal``: the interval is within the limit. ``rounds``: no decision in all rounds.
            ``void``: most rounds are void. ``both_failed``, ``problem``, ``cancelled``: no kernel can win.
        ratio: speed of B divided by the speed of A at the last look. Above 1 B is faster.
        interval: its interval, of 98 % over all looks together.
        certainty: certainty of a decision by times, 1 minus the test's probability of error over all looks.
        rounds: number of rounds with a value.
        voids: number of rounds without one: a failure of the fleet, another clock or another model of device.
        most: number of rounds at which the duel ends.
        due: number of rounds to judge before the next look, if none is being judged.
        a_failed, b_failed: category of a kernel's failure, None if it has not failed.
    """

    winner: Literal["a", "b"] | None = None
    reason: Reason | None = None
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    certainty: float | None = None
    rounds: int = 0
    voids: int = 0
    most: int = MOST
    due: int = 0
    a_failed: Category | None = None
    b_failed: Category | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the state as a JSON-safe record, with the state in words as ``message``."""
        return asdict(self) | {"message": self.words()}

    def words(self) -> str:
        """Return the state in one line."""
        measured = f"{self.rounds} rounds" + (f", {self.voids} void" if self.voids else "")
        if self.ratio is not None and self.interval is not None:
            low, high = self.interval
            measured = f"B has {self.ratio:.4g} times the speed of A ({low:.4g} to {high:.4g}), {measured}"
        failures = [f"{n} ended as {c}" for n, c in (("A", self.a_failed), ("B", self.b_failed)) if c is not None]
        sure = f"certainty {100 * (self.certainty or 0):.4g} %"
        name = (self.winner or "").upper()
        return {
            None: f"undecided: {measured} of {self.most} at most",
            "faster": f"{name} is faster, {sure}: {measured}",
            "failed": f"{name} wins, because {' and '.join(failures)}",
            "equal": f"equal within the limit, {sure}: {measured}",
            "rounds": f"no decision: {measured}",
            "void": f"no decision, because most rounds had no comparable times: {measured}",
            "both_failed": f"no winner, because {' and '.join(failures)}",
            "problem": "no winner, because the problem failed",
            "cancelled": f"cancelled: {measured}",
        }[self.reason]


def state(
    trials: Sequence[tuple[Trial | None, Trial | None]], *, within: float | None = None, most: int = MOST
) -> Duel:
    """Return the state of a duel.

    Args:
        trials: the rounds in order, each with the trials of A and B. None stands for a missing verdict.
        within: a duel ends as ``equal`` when the interval of the ratio is within ``1 / (1 + within)`` and
            ``1 + within``.
        most: number of rounds at which the duel ends.
    """
    ended = [[trial.category for pair in trials if (trial := pair[side]) is not None] for side in (0, 1)]
    failed = [next((one for one in of if one.blame is Blame.CANDIDATE), None) for of in ended]
    # A look counts rounds in their order, whichever verdict comes first.
    complete = list(takewhile(lambda pair: None not in pair, trials))
    values = [value for pair in complete if (value := _value(*pair)) is not None]
    counts, voids = looks(most), len(complete) - len(values)
    now = Duel(rounds=len(values), voids=voids, most=most, a_failed=failed[0], b_failed=failed[1])
    for winner, loser in ((0, 1), (1, 0)):
        if failed[loser] is not None and failed[winner] is None and Category.PASSED in ended[winner]:
            return replace(now, winner="ab"[winner], reason="failed")
    if all(failed):
        return replace(now, reason="both_failed")
    if any(one.blame is Blame.PROBLEM for of in ended for one in of):
        return replace(now, reason="problem")
    for count in counts:
        if now.reason is None and count <= len(values):
            now = replace(now, **_look(values[:count], len(counts), within))
    if now.reason is None and any(Category.CANCELLED in of for of in ended):
        return replace(now, reason="cancelled")
    if now.reason is None and len(values) >= most:
        return replace(now, reason="rounds")
    if now.reason is None and voids >= min(_FIRST, most) and voids > len(values):
        return replace(now, reason="void")
    if now.reason is not None or len(complete) < len(trials):
        return now
    return replace(now, due=next(count for count in counts if count > len(values)) - len(values))


@dataclass(frozen=True, slots=True)
class Match:
    """Two kernels that fight a duel.

    Attributes:
        a, b: the requests. They differ in kernel, backend and label at most.
        within, most: see :func:`state`.
        id: the id of the duel. It contains ``most`` and ``within``.
    """

    a: Request
    b: Request
    within: float | None
    most: int
    id: str

    @classmethod
    def of(cls, a: Request, b: Request, *, within: float | None = None, most: int = MOST) -> Self:
        """Return a new duel of two requests.

        Raises:
            InvalidRequest: the requests cannot be compared, or an option is out of range.
        """
        own = {"kernel", "backend", "kernel_label"}
        if a.model_dump(exclude=own) != b.model_dump(exclude=own):
            raise InvalidRequest("b: only kernel, backend and kernel_label can differ from a's")
        if not a.settings.timing.enabled:
            raise InvalidRequest("settings.timing.enabled: a duel compares times: leave it true")
        if not _FEWEST <= most <= _LIMIT:
            raise InvalidRequest(f"rounds: give {_FEWEST} to {_LIMIT}, not {most}")
        if within is not None and not 1e-6 <= within < 1:
            raise InvalidRequest(f"within: give a part such as 0.01 for 1 %, below 1, not {within:g}")
        limit = "" if within is None else f"-{within:.6f}".rstrip("0")
        return cls(a, b, *options(identity := f"{uuid4().hex[:12]}-{most}{limit}"), identity)

    @property
    def batch(self) -> str:
        """The name of the batch of the duel's evaluations."""
        return _BATCH + self.id

    def requests(self, start: int, number: int) -> list[Request]:
        """Return the requests of ``number`` rounds from round ``start`` on, two for each round, in random order.

        Their idempotency keys make a repeated submission harmless.
        """
        return [
            (self.a, self.b)[side].model_copy(
                update={"batch": self.batch, "reuse": False, "idempotency_key": f"{self.batch}/{one}/{'ab'[side]}"}
            )
            for one in range(start, start + number)
            for side in order(self.id, one)
        ]

    def state(self, results: Sequence[Result | None]) -> Duel:
        """Return the state after the results of :meth:`requests`, in the order of the requests from round 0 on."""
        return state_of(self.id, [None if result is None else Trial.of(result) for result in results])


def batch_id(batch: str | None) -> str | None:
    """Return the id of the duel whose batch this is, or None for another batch."""
    if batch is None or not batch.startswith(_BATCH):
        return None
    return identity if _ID.fullmatch(identity := batch.removeprefix(_BATCH)) else None


def options(identity: str) -> tuple[float | None, int]:
    """Return ``within`` and ``most`` of the duel with this id.

    Raises:
        InvalidRequest: no duel can have this id.
    """
    if (found := _ID.fullmatch(identity)) is None:
        raise InvalidRequest(f"{identity[:80]!r} is no id of a duel")
    return None if found[2] is None else float(found[2]), int(found[1])


def order(identity: str, number: int) -> tuple[int, int]:
    """Return the order of A (0) and B (1) in a round. It is random, but follows from the id."""
    first = hashlib.sha256(f"{identity}/{number}".encode()).digest()[0] & 1
    return first, 1 - first


def state_of(identity: str, trials: Sequence[Trial | None]) -> Duel:
    """Return the state of the duel with this id from its trials, in the order of :meth:`Match.requests`."""
    within, most = options(identity)
    rounds: list[tuple[Trial | None, Trial | None]] = []
    for number in range((len(trials) + 1) // 2):
        first, second = (*trials[2 * number : 2 * number + 2], None)[:2]
        rounds.append((first, second) if order(identity, number) == (0, 1) else (second, first))
    return state(rounds, within=within, most=most)


#: A function that judges requests, and returns or yields the results in their order.
Evaluate = Callable[[list[Request]], Iterable[Result | InvalidRequest]]


def duel(evaluate: Evaluate, match: Match) -> Iterator[Duel]:
    """Fight a duel, and yield its state after each result. The last one has a reason.

    Args:
        evaluate: judges the requests of all rounds up to the next look. ``LocalJudge.map`` and
            ``Client.evaluate_batch`` are such functions. If it yields its results one by one, no further one is taken
            from it once the duel has ended, and it is closed.
        match: the kernels.

    Raises:
        InvalidRequest: a request was refused.
    """
    results: list[Result | None] = []
    now = match.state(results)
    while now.reason is None:
        requests = match.requests(len(results) // 2, now.due)
        answers = iter(evaluate(requests))
        done = len(results)
        results += [None] * len(requests)
        for index, answer in zip(range(done, len(results)), answers, strict=True):
            if isinstance(answer, InvalidRequest):
                raise answer
            results[index] = answer
            now = match.state(results)
            yield now
            if now.reason is not None:
                break
        if isinstance(answers, Generator):
            answers.close()


@cache
def looks(most: int) -> tuple[int, ...]:
    """Return the numbers of rounds after which the test looks: 6, 9, 13, 19, 28, 40 for 40 rounds."""
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
    if abs(mean) > half:
        wrong = exceeds(abs(mean) / error, freedom) if error else 0.0
        return found | {"reason": "faster", "certainty": 1 - number * wrong, "winner": "b" if mean > 0 else "a"}
    return found


def _value(a: Trial | None, b: Trial | None) -> float | None:
    """Return the value of a round, or None for a void one."""
    if a is None or b is None or a.speedup is None or b.speedup is None:
        return None
    if a.clock != b.clock or a.device != b.device:
        return None
    return math.log(b.speedup / a.speedup)
