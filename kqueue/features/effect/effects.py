"""Effects: how much faster a kernel makes a model, next to the prediction from its speedup, and how its answers change.

An effect is made of ordinary evaluations. A recipe is a problem whose ``Model`` is a model of transformers and whose
shapes are workloads. From a recipe, a problem and its kernel :class:`Plan` generates requests that any judge judges as
always: sealed, and timed in turn with the reference.

- ``alone``: the kernel and its own problem, with a warm cache as in a model.
- ``operator``: the kernel and the first module that it replaces, on inputs of the model's shapes. This speedup predicts
  the effect, not the first one, because a model has its own implementation.
- ``drift``: the recipe with a ``check()``, which refuses the model with the kernel, and whose text has the distance of
  the logits, and theirs from fp32. So the reference's process measures it, and none of it is a claim of the kernel.
- ``original``, ``twice``, ``kernel``, in each round: the recipe, and as its kernel the same model, the model with each
  call of the operator made twice, and the model with the kernel. The first two give the operator's share, the first and
  the third the effect. They have one reference, so the cost of being judged as a kernel cancels.

The judge's tolerance would refuse most models with another operator, because rounding errors grow from layer to layer.
So the drift decides, and timed models have a tolerance that follows from it. A kernel that returns old answers when it
is timed exceeds it, and one that widens it has a large drift. ``sealed/swap.py`` finds operators by their answers.
"""

from __future__ import annotations

import ast
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Self
from uuid import uuid4

from pydantic import BaseModel

from kqueue import shapes
from kqueue.categories import Blame, Category
from kqueue.cli import sources
from kqueue.contract import Request, Result, parse_request
from kqueue.errors import InvalidRequest
from kqueue.features.duel.duels import Trial, critical, value_of
from kqueue.figures import is_noisy

#: Share of changed top tokens from which a kernel is named.
NAMED: Final = 0.01
_FOLDER: Final = Path(__file__).parent
_ROUND: Final = ("original", "twice", "kernel")
#: The code of problems and of kernels: parts, models, and the check of a drift. A kernel's own source precedes it.
_PARTS: Final = """
exec(compile({!r}, "swap.py", "exec", dont_inherit=True), _swap := {{"__name__": "swap"}})
_parts = _swap["Parts"]({!r}, {!r}, {!r}, {!r})
"""
_PROBLEM: Final = "Model, get_inputs = _parts.model(), _parts.get_inputs\n"
_CHECK: Final = """CHECK_BOUND = 0.05
def check(reference_outputs, outputs, inputs):
    return _parts.check(reference_outputs, outputs, inputs)
"""


class Ratio(BaseModel):
    """A ratio with its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, *roles: Sequence[Trial]) -> list[Self] | str:
        """Return the speed in each further role relative to the first role, or why it is unknown.

        Processes with the same model differ by more than the judge's intervals. This variance is estimated from the
        scatter in all roles together (Paule and Mandel). A trial with a wide interval has less weight.
        """
        base = next((one for one in roles[0] if one.interval), roles[0][0])
        known = [[(value_of(base, one), one.interval) for one in role] for role in roles]
        points = [[(x, math.log(i[1] / i[0]) / 3.92) for x, i in row if i and not isinstance(x, str)] for row in known]
        if not all(points):
            return next((x for some in known for x, _ in some if isinstance(x, str)), "no time")
        freedom, between = sum(map(len, points)) - len(points), 1e-9
        while True:
            weights = [[1 / (between + error**2) for _, error in some] for some in points]
            means = [fmean([x for x, _ in some], each) for some, each in zip(points, weights, strict=True)]
            pairs = ((mean, one) for mean, some in zip(means, points, strict=True) for one in some)
            if sum((x - mean) ** 2 / (between + error**2) for mean, (x, error) in pairs) <= freedom + 1e-6:
                break
            between *= 1.02
        student = critical(freedom, 0.05) if freedom else 1.96
        halves = [student * math.hypot(sum(each) ** -0.5, sum(weights[0]) ** -0.5) for each in weights]
        ranges = [(mean - means[0], half) for mean, half in zip(means, halves, strict=True)][1:]
        return [cls(value=math.exp(x), low=math.exp(x - half), high=math.exp(x + half)) for x, half in ranges]

    @property
    def half(self) -> float:
        return (self.high - self.low) / 2

    def __str__(self) -> str:
        """Return what the ratio is above 1, in percent."""
        low, value, high = (f"{100 * (one - 1):+.1f} %" for one in (self.low, self.value, self.high))
        return "too noisy" if is_noisy((self.low, self.high)) else f"{value} ({low} to {high})"


class Distance(BaseModel):
    """The distance of logits, whose root mean square is ``usual``, at ``tops`` positions."""

    tops: int
    changed: int
    kl: float
    largest: float
    usual: float

    def __str__(self) -> str:
        return f"{100 * self.changed / self.tops:.1f} % of {self.tops} top tokens changed, KL {self.kl:.2g}"


class Drift(BaseModel):
    """The drift by a kernel in ``places`` modules, which are called ``calls`` times, and by the precision (``own``)."""

    places: int
    calls: int
    shapes: tuple[str, ...]
    kernel: Distance
    own: Distance

    @property
    def tolerance(self) -> float:
        """The maximum difference of a logit when the model is timed. Rounding can choose another expert."""
        return max(4 * self.kernel.largest, 4 * self.own.largest, self.kernel.usual / 2)


class Workload(BaseModel):
    """The effect on one workload, or the reason why it ``ended`` without figures, or is ``unpredicted``.

    ``time_ms`` is the model's time, ``longer`` the ratio of a time with each call of the operator made twice to it,
    ``operator`` the kernel's speedup over the operator, ``predicted`` and ``measured`` the model's speedup.
    """

    name: str
    ended: str | None = None
    drift: Drift | None = None
    time_ms: float | None = None
    longer: Ratio | None = None
    operator: Ratio | None = None
    unpredicted: str | None = None
    predicted: Ratio | None = None
    measured: Ratio | None = None

    def words(self) -> Iterator[str]:
        """Yield the result in lines."""
        if (drift := self.drift) is not None:
            yield f"{self.name}: in {drift.places} modules, {drift.calls} calls with {'; '.join(drift.shapes)}"
            yield f"  drift: {drift.kernel}. The precision's own: {drift.own}"
            if drift.kernel.changed >= NAMED * drift.kernel.tops:
                more = "more than" if drift.kernel.changed > drift.own.changed else "no more than"
                yield f"  the kernel changes 1 % of the top tokens or more, {more} the precision"
        if self.longer is not None and self.time_ms is not None:
            yield f"  the operator's share of {self.time_ms:.4g} ms: {self.longer}"
        if self.predicted is not None and self.operator is not None:
            yield f"  predicted gain: {self.predicted}, because the operator gains {self.operator}"
        if self.unpredicted is not None:
            yield f"  no prediction: {self.unpredicted}"
        if self.measured is not None:
            none = ", no effect" if self.measured.low <= 1 <= self.measured.high else ""
            yield f"  measured gain: {self.measured}{none}"
        if self.predicted is not None and self.measured is not None:
            far = abs(self.predicted.value - self.measured.value)
            if far > max(0.02, math.hypot(self.predicted.half, self.measured.half)):
                yield f"  prediction and measurement differ by {100 * far:.1f} points"
        if self.ended is not None:
            yield f"  {self.ended}" if self.drift else f"{self.name}: {self.ended}"


class Effect(BaseModel):
    """The effect of a kernel on a model, without workloads if it fails alone. ``blame`` is the first failure's."""

    model: str
    kernel: str
    verdict: dict[str, Any]
    blame: Blame
    workloads: list[Workload] = []

    def words(self) -> Iterator[str]:
        """Yield the result in lines."""
        message = "" if self.workloads else f": {self.verdict['message']}"
        yield f"{self.kernel} alone: {self.verdict['category']}{message}"
        for one in self.workloads:
            yield from one.words()

    def failed(self, one: Workload, result: Result, when: str) -> None:
        """Note the failure of a workload's evaluation."""
        blame, message = result.blame, result.message
        if blame is Blame.CANDIDATE and when in _ROUND[:2]:
            blame, what = Blame.PROBLEM, "the model fails without the kernel"
        elif blame is Blame.CANDIDATE or result.passed:
            what = f"the kernel fails in the model ({when})"
        elif blame is Blame.PROBLEM:
            # The search for the operator raises LookupErrors with whole sentences.
            message = message.rpartition(" raised LookupError: ")[2]
            message += ". kqueue[effect] brings it" if "'transformers'" in message else ""
            is_large = result.facts.allowed_bytes is not None or result.facts.reason == "memory"
            what = "the model does not fit the memory" if is_large else f"{self.model} cannot be used"
        else:
            what = "not judged"
        one.ended = one.ended or f"{what}: {result.category}: {message}"
        self.blame = blame if self.blame is Blame.NONE else self.blame


@dataclass(frozen=True, slots=True)
class Plan:
    """The evaluations of an effect: ``request`` is the kernel alone, ``workloads`` are problems by name."""

    model: str
    request: Request
    workloads: dict[str, str]
    rounds: int
    operator: str
    id: str

    @classmethod
    def of(cls, request: Request, model: str, rounds: int, operator: str = "") -> Self:
        """Return the plan for a kernel and a recipe, which is the name of one that kqueue brings, or a file.

        ``operator`` is the path by which the model calls a function, or empty for the recipe's OPERATOR, or modules.
        Raise InvalidRequest if the recipe cannot be read, or the request has no source or no times.
        """
        known = {file.stem: file for file in sorted(_FOLDER.glob("recipes/*.py"))}
        if model not in known and not Path(model).exists():
            raise InvalidRequest(f"--model {model}: no such file, and kqueue brings {', '.join(known)}")
        if not request.settings.timing.enabled:
            raise InvalidRequest("settings.timing.purpose: an effect compares times: choose another one than check")
        if request.names_problem:
            raise InvalidRequest("--problem: give a file, because the model needs the source")
        recipe = sources.read_source(known.get(model, Path(model)))
        if "LANGUAGE = " in recipe and "class Model" not in recipe:
            recipe += (_FOLDER / "sealed" / "language.py").read_text()
        workloads = {one.name: shapes.problem_of(recipe, one) for one in shapes.read(recipe)} or {"forward": recipe}
        return cls(Path(model).stem, request, workloads, rounds, operator, uuid4().hex[:12])

    def evaluation(self, role: str, workload: str = "", number: int = 0, drift: Drift | None = None) -> Request:
        """Return the request of a role: ``alone``, or one with a workload."""
        name = " ".join(filter(None, (workload, role, str(number))))
        given = self.request.model_dump(exclude_unset=True, mode="json")
        fields = given | {"batch": f"effect-{self.id}", "idempotency_key": f"effect-{self.id}/{name}"}
        settings = sources.merged({"timing": {"cold_l2": False}}, given.get("settings", {}))
        if workload:
            problem, kernel = self.request.problem, self.request.kernel
            shown = [shapes.problem_of(problem, one) for one in shapes.read(problem) if not one.held_out]
            swap = (_FOLDER / "sealed" / "swap.py").read_text()
            recipe, is_own = self.workloads[workload], role in _ROUND[:2]
            # The models of a round have one problem, so that a reference can serve several of them.
            roles = "" if role in _ROUND else role, role
            parts = [_PARTS.format(swap, recipe, shown or [problem], self.operator, one) for one in roles]
            declared = shapes.assigned(problem, "OUTPUT_TOLERANCE") if role == "operator" else ()
            tolerance = (f"OUTPUT_TOLERANCE = {ast.unparse(value)}\n" for *_, value in declared if value)
            start, end = ("", "ModelNew = _parts.model()") if is_own else (kernel, "ModelNew = _parts.model(ModelNew)")
            fields |= {
                "problem": parts[0] + _PROBLEM + _CHECK * (role == "drift") + "".join(tolerance),
                "kernel": f"{start}\n{parts[1]}{end}\n",
                "backend": "torch" if is_own else self.request.backend,
                "problem_label": f"{self.model} {name}",
                "reuse": False,
            }
        if role in ("drift", *_ROUND):
            unseen = {"findings": "allow", "decoys": "allow", "buffers": "allow"}
            tolerance = {"atol": 1.0 if drift is None else drift.tolerance, "rtol": 0.0}
            off = {"timing": {"purpose": "check"}} if role == "drift" else {}
            settings = sources.merged(settings, {"checks": 1, "policies": unseen, "tolerance": tolerance, **off})
            settings = {name: settings[name] for name in settings.keys() - {"comparison", "tolerances", "profiles"}}
        return parse_request(fields | {"settings": settings})


def effect(
    evaluate: Callable[[list[Request]], Iterable[Result | InvalidRequest]],
    plan: Plan,
    report: Callable[[str], object] = lambda _: None,
) -> Effect:
    """Measure an effect. Raise InvalidRequest if a request was refused.

    ``evaluate`` returns or yields the results of requests in their order, such as ``LocalJudge.map`` and
    ``Client.evaluate_batch``. ``report`` is called with the name of each evaluation that has a result.
    """

    def judged(requests: Sequence[Request]) -> Iterator[Result]:
        for request, answer in zip(requests, evaluate(list(requests)), strict=True):
            if isinstance(answer, InvalidRequest):
                raise answer
            report(str(request.idempotency_key).partition("/")[2])
            yield answer

    [alone] = judged([plan.evaluation("alone")])
    done = Effect(model=plan.model, kernel=str(plan.request.kernel_label), verdict=alone.summary(), blame=alone.blame)
    if not alone.passed:
        return done
    done.workloads += (Workload(name=name) for name in plan.workloads)
    requests = [plan.evaluation("drift", name) for name in plan.workloads]
    for one, result in zip(done.workloads, judged(requests), strict=True):
        found = re.search(r"\{.*\}", result.message)  # the text of check()
        if result.category is Category.WRONG_VALUES and result.evidence.checker and found:
            one.drift = Drift.model_validate_json(found[0])
        else:
            done.failed(one, result, "drift")
    trials = {(one.name, role): list[Trial]() for one in done.workloads for role in _ROUND}
    for number in range(plan.rounds):
        roles = (*_ROUND, "operator") if number == 0 else _ROUND
        due = [(one, role) for one in done.workloads if not one.ended for role in roles]
        random.SystemRandom().shuffle(due)
        requests = [plan.evaluation(role, one.name, number, one.drift) for one, role in due]
        for (one, role), result in zip(due, judged(requests), strict=True):
            if role == "operator":
                one.unpredicted = f"with the model's shapes the kernel ended as {result.category}: {result.message}"
                if result.speedup is not None and (interval := result.speedup_interval) is not None:
                    one.operator = Ratio(value=result.speedup, low=interval[0], high=interval[1])
            elif result.blame in (Blame.CANDIDATE, Blame.PROBLEM):
                done.failed(one, result, role)
            else:
                trials[one.name, role].append(Trial.of(result))
                one.time_ms = one.time_ms or result.baseline_ms
    for one in done.workloads:
        one.ended = one.ended or _conclude(one, *(trials[one.name, role] for role in _ROUND))
    return done


def _conclude(one: Workload, original: list[Trial], twice: list[Trial], kernel: list[Trial]) -> str | None:
    """Set the operator's share, and the prediction and the measurement of a workload. Return why there are none."""
    if isinstance(found := Ratio.of(original, twice, kernel), str):
        return f"there are no times to compare: {found}"
    doubled, one.measured = found
    one.longer = longer = Ratio(value=1 / doubled.value, low=1 / doubled.high, high=1 / doubled.low)
    if one.operator is not None:
        share, speedup = longer.value - 1, one.operator.value
        left = max(1 - share + share / speedup, 1e-9)
        error = math.hypot((1 - 1 / speedup) * longer.half, share / speedup**2 * one.operator.half) / left
        one.unpredicted = "the times are too noisy" if error > math.log(100) else None
        if one.unpredicted is None:
            one.predicted = Ratio(value=1 / left, low=math.exp(-error) / left, high=math.exp(error) / left)
    return None
