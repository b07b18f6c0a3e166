"""The search for the smallest problem on which a kernel fails in the same way, and its inputs.

The inputs of a smaller problem are the problem's own draws under fixed seeds, or simple values instead. The judge's
seeds are secret, so a failure that depends on them could not be reproduced. A smaller problem therefore draws its
inputs under seeds in its source.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from typing import Final, TypeVar

from kqueue import shapes
from kqueue.categories import OF_OUTPUTS, Category
from kqueue.contract import Examination, Phase, Request, Result, Settings
from kqueue.evidence import Facts, InputTensor
from kqueue.features.autopsy.report import SEED, Change, Ended, Report, program, words_of
from kqueue.feedback import last_frame


class Fill(StrEnum):
    """The values of floating inputs. Inputs of other dtypes are always the problem's own."""

    DRAWN = "drawn"
    """The values that the problem draws."""
    ZEROS = "zeros"
    ONES = "ones"
    FIRST = "one 1, then zeros"
    LAST = "zeros, then one 1"
    ARANGE = "0, 1, 2, ..."
    LARGE = "drawn, times 100"
    SMALL = "drawn, over 128"
    INTEGERS = "drawn, rounded to whole numbers"
    OUTLIERS = "drawn, every 64th replaced by an extreme"
    SPARSE = "one drawn value, and 0 elsewhere"
    BLOCKS = "the least and the largest drawn value by turns, in 9 blocks"


#: Simple values, the simplest first.
PLAIN: Final = (Fill.ZEROS, Fill.ONES, Fill.FIRST, Fill.LAST, Fill.ARANGE)
#: Values that resemble each kind of the judge's hidden inputs.
LIKE: Final = {
    "scaled": (Fill.LARGE, Fill.SMALL),
    "uniform": (Fill.LARGE, Fill.BLOCKS),
    "integers": (Fill.INTEGERS,),
    "adversarial": (Fill.OUTLIERS,),
}
#: Values that resemble all remaining kinds of hidden inputs.
LIKE_OTHERS: Final = (Fill.SPARSE, Fill.BLOCKS)

#: Source that is appended to a problem. The judge's seed selects one of the seeds, so that its input sets differ. The
#: lowest bit is ignored, so that neighbouring seeds, with which the judge tests which inputs vary, give equal inputs.
_WRAP: Final = '''

def _fixed_inputs(draw, seeds, fill, keep):
    """Return get_inputs() with seeds, values and the range of elements (all others are 0) that autopsy chose."""
    import random
    import sys

    def change(value, flat):
        if isinstance(value, (list, tuple)):
            return type(value)(change(item, flat) for item in value)
        if isinstance(value, dict):
            return {{key: change(item, flat) for key, item in value.items()}}
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
            return value
        made = value.detach().clone().contiguous().reshape(-1)
        count = made.numel()
        if fill in ("zeros", "one 1, then zeros", "zeros, then one 1"):
            made.zero_()
        if fill == "ones":
            made.fill_(1)
        elif fill == "one 1, then zeros":
            made[0] = 1
        elif fill == "zeros, then one 1":
            made[-1] = 1
        elif fill == "0, 1, 2, ...":
            made.copy_(torch.arange(count))
        elif fill == "drawn, times 100":
            made.mul_(100)
        elif fill == "drawn, over 128":
            made.div_(128)
        elif fill == "drawn, rounded to whole numbers":
            made.round_()
        elif fill == "drawn, every 64th replaced by an extreme":
            extremes = (1e4, -1e4, 0.0, -0.0, 1e-40, 1e-4)
            for place, at in enumerate(range(0, count, 64)):
                made[at] = extremes[place % len(extremes)]
        elif fill == "one drawn value, and 0 elsewhere":
            at = int(torch.randint(count, ()))
            one = made[at].clone()
            made.zero_()[at] = one
        elif fill == "the least and the largest drawn value by turns, in 9 blocks":
            ends = made.aminmax()
            for place, block in enumerate(made.tensor_split(9)):
                block.fill_(ends[place % 2])
        if keep is not None:
            begin, end = (min(max(edge - flat[0], 0), count) for edge in keep)
            made[:begin] = 0
            made[end:] = 0
        flat[0] += count
        return made.reshape(value.shape)

    def get_inputs():
        seed = seeds[torch.initial_seed() // 2 % len(seeds)]
        torch.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)
        return change(draw(), [0])

    return get_inputs


import torch

get_inputs = _fixed_inputs(get_inputs, {seeds!r}, {fill!r}, {keep!r})
'''


def fixed(source: str, seeds: tuple[int, ...], fill: Fill, keep: tuple[int, int] | None) -> str:
    """Return a problem's source with inputs as in a :class:`Case` with fixed seeds. The source is not run."""
    return source.rstrip("\n") + "\n" + _WRAP.format(seeds=seeds, fill=str(fill), keep=keep)


EndT = TypeVar("EndT")
#: A generator of rounds. It yields requests to judge concurrently, the smallest problem first, and receives their
#: results, None where there is none.
Rounds = Generator[list[Request], Sequence[Result | None], EndT]

#: Failures that depend on inputs. Other failures occur before there are inputs, or concern time.
SHRUNK: Final = OF_OUTPUTS | frozenset(
    {
        Category.INIT_ERROR,
        Category.RUNTIME_ERROR,
        Category.ILLEGAL_MEMORY_ACCESS,
        Category.CUDA_ERROR,
        Category.LAUNCH_RESOURCES_EXCEEDED,
        Category.GPU_OUT_OF_MEMORY,
        Category.HOST_OUT_OF_MEMORY,
        Category.CRASHED,
        Category.TIMEOUT,
        Category.OUTPUT_LIMIT,
        Category.SANDBOX_VIOLATION,
        Category.NONDETERMINISTIC,
    }
)
#: Categories of wrong values, whose kinds are compared instead.
_WRONG: Final = frozenset({Category.NOT_FINITE, Category.WRONG_VALUES})
#: Maximum relative error of the first wrong values that counts as rounding, as of products of bf16 numbers.
_ROUNDING: Final = 0.1
#: Phases before a kernel receives any of its problem's data.
_EARLY: Final = frozenset({Phase.PREPARE, Phase.REFERENCE, Phase.LOAD})
#: Seeds of the input sets while sizes shrink. A wrong value does not always show on a single set.
_SEEDS: Final = tuple(range(8))
#: Maximum product of a problem's numbers for which each input set is checked :data:`_OFTEN` times on average.
_SMALL: Final = 1 << 16
_OFTEN: Final = 3
#: Upper bounds of all sizes that are tried first: small ones, and powers of two with their neighbours, where tails are.
_CAPS: Final = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 256, 257, 512, 1024, 1025)
#: Single sizes that are tried first.
_SMALLEST: Final = (1, 2, 3)
#: Maximum seconds of a call that is expected to hang.
_HANG_S: Final = 10.0
_GIVEN: Final = "given"


@dataclass(frozen=True, slots=True)
class Case:
    """A smaller problem: its numbers' values, and its input sets by the judge's seeds unless it has seeds.

    Elements outside ``keep`` are set to 0.
    """

    sizes: tuple[int, ...]
    seeds: tuple[int, ...] = ()
    fill: Fill = Fill.DRAWN
    keep: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class _Found:
    """A problem on which the kernel failed in the same way."""

    case: Case
    result: Result

    @property
    def tensors(self) -> tuple[InputTensor, ...]:
        return self.result.evidence.inputs or ()

    @property
    def elements(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    @property
    def size(self) -> tuple[int, int]:
        """The sort key of a case. Smaller is better."""
        return self.elements, sum(self.case.sizes)


class _Spent(Exception):
    """Signals that no evaluation is left."""


class Autopsy:
    """An autopsy of one kernel.

    ::

        rounds = autopsy.rounds()
        requests = next(rounds)
        while True:
            try:
                requests = rounds.send([judge(request) for request in requests])
            except StopIteration:
                break
        report = autopsy.report()
    """

    def __init__(self, request: Request, failure: Result | None = None, *, width: int = 1, most: int = 100) -> None:
        """Prepare an autopsy of at most ``most`` evaluations, and of ``width`` requests in a round.

        If the ``failure`` is not known, the kernel is judged first.
        """
        # A failure can depend on the weights, so all evaluations have the same.
        seed = SEED if request.settings.seed is None else request.settings.seed
        unexamined = request.settings.model_copy(update={"examine": Examination(), "seed": seed})
        self._request = request.model_copy(update={"settings": unexamined})
        self._width = max(1, width)
        self._most = most
        self._timed = False
        self._tried: set[Case] = set()
        self._first: _Found | None = None
        self._best: _Found | None = None
        self._done = False
        self.failure = failure
        self.evaluations = 0
        self._take_shape()

    def same(self, result: Result | None) -> bool:
        """Return True if a result has the same failure."""
        if result is None or self.failure is None or _signature(result) != _signature(self.failure):
            return False
        # A failure on the problem's own inputs must not become one that occurs only on hidden inputs.
        return self.failure.facts.kind != _GIVEN or result.facts.kind == _GIVEN

    def settled(self, results: Mapping[int, Result], asked: int) -> bool:
        """Return True if the remaining results of a round of ``asked`` requests are not needed.

        The ``results`` so far have the index of their request in the round.
        """
        for index in range(asked):
            if index not in results:
                return False
            if self.same(results[index]):
                return True  # the other problems are larger
        return True

    def rounds(self) -> Rounds[None]:
        """Yield the requests to judge, round by round, until there is nothing smaller to try.

        Results that are late, or that :meth:`settled` does not need, are None.
        """
        try:
            if not (yield from self._confirm()):
                return
            yield from self._start()
            yield from self._refine()
            yield from self._simplify()
            self._done = True
        except _Spent:
            return

    def progress(self) -> str:
        """Return the state of the autopsy in one line."""
        if self.failure is None:
            return "the kernel's failure is not known yet"
        best = self._best or self._first
        return f"{self.failure.category}" + (f": fails on {words_of(best.tensors)}" if best is not None else "")

    def report(self, seconds: float = 0.0, ended: Ended | None = None) -> Report:
        """Return the report of the autopsy so far. ``ended`` is ``time`` or ``interrupted`` if that ended it."""
        failure = self.failure
        if failure is None:
            raise ValueError("no failure of the kernel is known")
        if (refusal := refused(failure)) is not None:
            ended = Ended.REFUSED
        elif ended is None:
            again = self._first is not None
            ended = Ended.SMALLEST if self._done else Ended.EVALUATIONS if again else Ended.NOT_AGAIN
        best = self._best or self._first
        problem = self._source(best.case) if best is not None else None
        shown = best.result if best is not None else failure
        asked = self._request.model_copy(update={"settings": self._hurried(self._request.settings)})
        return Report(
            category=failure.category,
            message=shown.message,
            ended=ended,
            refusal=refusal,
            before=self._first.tensors if self._first is not None else failure.evidence.inputs,
            after=best.tensors if best is not None else None,
            changes=tuple(self._changes(best.case)) if best is not None else (),
            fill=str(best.case.fill) if best is not None and best.case.seeds else None,
            kept=best.case.keep if best is not None else None,
            seeds=best.case.seeds if best is not None else (),
            facts=shown.facts,
            evaluations=self.evaluations,
            seconds=round(seconds, 3),
            problem=problem,
            repro=None
            if problem is None or best is None
            else program(asked, problem, best.result, best.case.seeds, self._summary(best)),
        )

    def _take_shape(self) -> None:
        """Find the sizes of the problem: if it names several shapes, with the one on which the kernel failed only."""
        name = self.failure.facts.shape if self.failure is not None else None
        if name is not None:
            for shape in shapes.read(self._request.problem):
                if shape.name == name and not shape.held_out:
                    problem = shapes.problem_of(self._request.problem, shape)
                    self._request = self._request.model_copy(update={"problem": problem})
        self._numbers = shapes.sizes_of(self._request.problem)
        self._own = Case(tuple(number.value for number in self._numbers))

    def _confirm(self) -> Rounds[bool]:
        """Judge the original problem: first without timing, and then, if it does not fail, with all settings."""
        if self.failure is not None and refused(self.failure) is not None:
            return False
        request = self._request
        for settings in (_untimed(request.settings), request.settings):
            settings = self._hurried(settings)
            [result] = yield from self._ask([request.model_copy(update={"settings": settings, "reuse": False})])
            if self.failure is None and result is not None and (result.judged and not result.passed):
                self.failure = result
            if self.failure is not None and refused(self.failure) is not None:
                return False
            if result is not None and self.same(result):
                self._take_shape()
                self._first = _Found(self._own, result)
                self._timed = settings.timing.enabled
                return True
            if settings.timing.enabled or not request.settings.timing.enabled:
                self.failure = self.failure or result
                return False
        return False

    def _start(self) -> Rounds[None]:
        """Find inputs on which the kernel fails under fixed seeds, and then small values for all sizes at once."""
        assert self.failure is not None
        kind = self.failure.facts.kind
        fixed = replace(self._own, seeds=_SEEDS)
        if kind is None or kind == _GIVEN:
            if (yield from self._try(self._joint(fixed))) or (yield from self._try([fixed])):
                return
        else:
            # The kernel is correct on the problem's own draws. Otherwise its verdict would have another kind.
            like = (*LIKE.get(kind, LIKE_OTHERS), *PLAIN)
            if (yield from self._try(replace(fixed, fill=fill) for fill in like)):
                assert self._best is not None
                yield from self._try(self._joint(self._best.case))
                return
        yield from self._try(self._joint(self._own))
        self._best = self._best or self._first

    def _joint(self, case: Case) -> Iterator[Case]:
        """Yield the case with all sizes reduced at once, the smallest first."""
        most = max(case.sizes, default=1)
        for cap in _CAPS:
            if cap < most:
                yield replace(case, sizes=tuple(min(size, cap) for size in case.sizes))
        divisor = 1 << max(0, most.bit_length() - 1)
        while divisor > 1:
            yield replace(case, sizes=tuple(max(1, size // divisor) for size in case.sizes))
            divisor //= 2

    def _refine(self) -> Rounds[None]:
        """Shrink equal numbers together, and then each number alone, until none can be smaller."""
        equal: dict[int, list[int]] = {}
        for index, size in enumerate(self._own.sizes):
            equal.setdefault(size, []).append(index)
        groups = [indices for indices in equal.values() if len(indices) > 1]
        groups += [[index] for index in range(len(self._own.sizes))]
        shrunk = True
        while shrunk:
            shrunk = False
            for indices in sorted(groups, key=lambda indices: -max(self._sizes(indices))):
                shrunk |= yield from self._bisect(indices)

    def _sizes(self, indices: Sequence[int]) -> list[int]:
        assert self._best is not None
        return [self._best.case.sizes[index] for index in indices]

    def _bisect(self, indices: Sequence[int]) -> Rounds[bool]:
        """Shrink some numbers: to the smallest values, or else by bisection that includes odd neighbours."""
        shrunk = False
        high = max(self._sizes(indices))
        if (yield from self._try(self._with(indices, (v for v in _SMALLEST if v < high)))):
            return True
        low = _SMALLEST[-1]
        while high - low > 1:
            ratio = (high / low) ** (1 / (self._width + 1))
            middles = {min(max(round(low * ratio**step), low + 1), high - 1) for step in range(1, self._width + 1)}
            # Tails show at odd sizes, which are next to the middle.
            middles |= {middle + 1 for middle in middles if middle + 1 < high}
            tried = sorted(middles)
            if (yield from self._try(self._with(indices, tried))):
                shrunk = True
                high = max(self._sizes(indices))
                low = max([low, *(value for value in tried if value < high)])
            else:
                low = tried[-1]
        return shrunk

    def _with(self, indices: Sequence[int], values: Iterable[int]) -> Iterator[Case]:
        assert self._best is not None
        case = self._best.case
        for value in values:
            changed = (min(size, value) if index in indices else size for index, size in enumerate(case.sizes))
            yield replace(case, sizes=tuple(changed))

    def _simplify(self) -> Rounds[None]:
        """Simplify the inputs: one value everywhere, one input set, one element that is not 0."""
        assert self._best is not None
        case = self._best.case
        if not case.seeds:
            return
        one = case.seeds[:1]
        wanted = PLAIN if self._best.elements > 1 else PLAIN[:2]
        floats = any("float" in tensor.dtype for tensor in self._best.tensors)
        if case.fill not in PLAIN and floats:
            yield from self._try(replace(case, seeds=one, fill=fill) for fill in wanted)
        if len(self._best.case.seeds) > 1:
            # A kernel that caches an answer needs two sets to fail.
            single = [replace(case, seeds=(seed,)) for seed in case.seeds]
            yield from self._try([*single, replace(case, seeds=case.seeds[:2])])
        if self._best.case.fill in PLAIN or not floats:
            return
        begin, end = 0, self._best.elements
        while end - begin > 1:
            middle = (begin + end) // 2
            halves = [(begin, middle), (middle, end)]
            if not (yield from self._try(replace(self._best.case, keep=half) for half in halves)):
                return
            assert self._best.case.keep is not None
            begin, end = self._best.case.keep

    def _try(self, cases: Iterable[Case]) -> Rounds[bool]:
        """Judge cases in order until one has the same failure, and store that one. Return whether there is one."""
        fresh = iter([case for case in dict.fromkeys(cases) if case not in self._tried])
        while chunk := list(islice(fresh, self._width)):
            self._tried.update(chunk)
            results = yield from self._ask([self._ask_for(case) for case in chunk])
            for case, result in zip(chunk, results, strict=True):
                if result is not None and self.same(result):
                    failing = _Found(case, result)
                    # Accept a simpler or smaller case. Sizes that made the inputs larger are neither.
                    if self._best is None or failing.size <= self._best.size:
                        self._best = failing
                        return True
        return False

    def _ask(self, requests: list[Request]) -> Rounds[Sequence[Result | None]]:
        made = requests[: self._most - self.evaluations]
        if not made:
            raise _Spent
        results = list((yield made))
        self.evaluations += len(made)
        return results + [None] * (len(requests) - len(results))

    def _ask_for(self, case: Case) -> Request:
        """Return the request to judge a case, with few checks and without timing where the failure permits that."""
        settings = self._request.settings
        if not self._timed:
            settings = _untimed(settings)
        checks = _checks(case) if len(case.seeds) > 1 else 2 if case.seeds else settings.checks
        settings = self._hurried(settings).model_copy(update={"checks": checks})
        return self._request.model_copy(
            update={
                "problem": self._source(case),
                "settings": settings.model_copy(update={"max_attempts": 1}),
                "problem_label": f"autopsy of {self._request.problem_label or 'a problem'}"[:200],
                "reuse": True,
            }
        )

    def _hurried(self, settings: Settings) -> Settings:
        """Shorten the deadlines of a call that is expected to hang."""
        if self.failure is None or self.failure.category is not Category.TIMEOUT:
            return settings
        limits = {name: min(seconds, _HANG_S) for name, seconds in settings.deadlines if name != "reference_s"}
        return settings.model_copy(update={"deadlines": settings.deadlines.model_copy(update=limits)})

    def _source(self, case: Case) -> str:
        source = shapes.with_sizes(self._request.problem, self._numbers, case.sizes)
        return fixed(source, case.seeds, case.fill, case.keep) if case.seeds else source

    def _changes(self, case: Case) -> Iterator[Change]:
        for number, size in zip(self._numbers, case.sizes, strict=True):
            if size != number.value:
                yield Change(line=number.line, name=number.name, before=number.value, after=size)

    def _summary(self, best: _Found) -> str:
        """Return a text on how the problem was shrunk."""
        assert self._first is not None
        changed = ", ".join(f"line {c.line}: {c.before} -> {c.after}" for c in self._changes(best.case)) or "none"
        return "\n".join(
            (
                f"inputs before: {words_of(self._first.tensors)}",
                f"inputs now:    {words_of(best.tensors)}",
                f"numbers of the problem that were changed: {changed}",
                f"values: {best.case.fill if best.case.seeds else 'drawn by the problem'}",
            )
        )


def refused(result: Result) -> str | None:
    """Return the reason why a result has no autopsy, or None if it has one."""
    if result.passed:
        return "the kernel passed: there is no failure to examine"
    if not result.judged:
        return f"{result.category}: this says nothing about the kernel ({result.message})"
    if result.facts.withheld:
        return "the kernel failed on a shape that is held out, of which only the result is shown"
    if result.evidence.tests is not None:
        return "the result is of a repository's tests and not of a kernel: see pytest's report"
    if result.category not in SHRUNK or result.phase in _EARLY:
        return f"{result.category}: this failure does not depend on inputs or their sizes: see its verdict"
    return None


def _untimed(settings: Settings) -> Settings:
    return settings.model_copy(update={"timing": settings.timing.off()})


def _signature(result: Result) -> tuple[object, ...]:
    """Return the properties that identify a failure. Single values and text of a kernel are not among them."""
    facts = result.facts
    raised = (facts.exception, facts.cuda_code, last_frame(result.log)) if facts.exception is not None else None
    return (
        _kind(facts) if result.category in _WRONG else result.category,
        result.phase,
        raised,
        facts.signal,
        facts.exit_status,
        facts.reason,
        facts.output,
        facts.input,
    )


def _kind(facts: Facts) -> str:
    """Return the kind of wrong values. Memory outside a tensor can hold NaN at one shape and numbers at another."""
    first = facts.first or ()
    if facts.unwritten == facts.of or (facts.wrong == facts.of and not any(wrong.got for wrong in first)):
        return "nothing was computed, as with an empty grid"
    error = math.dist([wrong.got for wrong in first], expected := [wrong.expected for wrong in first])
    small = error < _ROUNDING * math.hypot(*expected)
    return "some were never written" if facts.unwritten else "rounding" if small else "others"


def _checks(case: Case) -> int:
    """Return a number of checks that rarely misses the failing sets, because the judge's seeds sample the sets."""
    # Eight checks miss three of eight sets in one evaluation of 43, and one of two in one of 256. Small problems cost
    # almost nothing.
    return len(_SEEDS) * (_OFTEN if math.prod(case.sizes) <= _SMALL else 1)
