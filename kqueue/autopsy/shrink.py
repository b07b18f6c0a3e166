"""The search for the smallest problem on which a kernel still fails in the same way."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from kqueue import sizes
from kqueue.autopsy import inputs, repro
from kqueue.autopsy.inputs import Fill
from kqueue.autopsy.report import Change, Ended, Report, words_of
from kqueue.categories import Category
from kqueue.contract import Examination, Phase, Request, Result, Settings
from kqueue.evidence import InputTensor
from kqueue.feedback import last_frame

#: Requests to judge beside each other, the smallest problem first; what became of them, None where nothing is known.
Rounds = Generator[list[Request], Sequence[Result | None], None]

#: The failures that inputs decide. Others come before there are inputs, or are about time.
SHRUNK: Final = frozenset(
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
        Category.WRONG_OUTPUT_STRUCTURE,
        Category.WRONG_SHAPE,
        Category.WRONG_DTYPE,
        Category.WRONG_DEVICE,
        Category.NOT_FINITE,
        Category.WRONG_VALUES,
        Category.INPUT_MUTATED,
        Category.NONDETERMINISTIC,
    }
)
#: The phases before a kernel is given anything of its problem's.
_EARLY: Final = frozenset({Phase.PREPARE, Phase.REFERENCE, Phase.LOAD})
#: The seeds of the input sets while sizes shrink: a wrong value need not show on a single one.
_SEEDS: Final = tuple(range(8))
#: Where the product of a problem's numbers is no larger, each set is checked so often on average.
_SMALL: Final = 1 << 16
_OFTEN: Final = 3
#: The bounds of all sizes that are tried first: small ones, and powers of two and their neighbours, where tails are.
_CAPS: Final = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 256, 257, 512, 1024, 1025)
#: Single sizes that are tried first.
_SMALLEST: Final = (1, 2, 3)
#: The longest that a call may take which is expected to hang, in seconds.
_HANG_S: Final = 10.0
_GIVEN: Final = "given"


@dataclass(frozen=True, slots=True)
class Case:
    """A smaller problem.

    Attributes:
        sizes: the value of each of the problem's numbers.
        seeds: of the input sets; empty for the problem's own ``get_inputs()`` under the judge's seeds.
        fill: the values of floating inputs.
        keep: the range of elements that is not set to 0; None for all.
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
        """Smaller is better."""
        return self.elements, sum(self.case.sizes)


class _Spent(Exception):
    """No further evaluation may be made."""


class Autopsy:
    """One kernel's autopsy.

    ::

        rounds = autopsy.rounds()
        requests = next(rounds)
        while True:
            try:
                requests = rounds.send([judge(request) for request in requests])
            except StopIteration:
                break
        report = autopsy.report()

    Attributes:
        evaluations: how many have been made.
        failure: how the kernel fails; None while that is not known.
    """

    def __init__(self, request: Request, failure: Result | None = None, *, width: int = 1, most: int = 100) -> None:
        """Prepare an autopsy.

        Args:
            request: the problem's and the kernel's sources, how they are judged, and where.
            failure: how the kernel failed; None has it judged first.
            width: the most requests of one round.
            most: the most evaluations.
        """
        unexamined = request.settings.model_copy(update={"examine": Examination()})
        self._request = request.model_copy(update={"settings": unexamined})
        self._numbers = sizes.find(request.problem)
        self._own = Case(tuple(number.value for number in self._numbers))
        self._width = max(1, width)
        self._most = most
        self._timed = False
        self._tried: set[Case] = set()
        self._first: _Found | None = None
        self._best: _Found | None = None
        self._done = False
        self.failure = failure
        self.evaluations = 0

    def same(self, result: Result | None) -> bool:
        """Return True if a result is the failure that is looked for."""
        if result is None or self.failure is None or _signature(result) != _signature(self.failure):
            return False
        # What fails on the problem's own inputs must not become what only fails on hidden ones.
        return self.failure.facts.kind != _GIVEN or result.facts.kind == _GIVEN

    def settled(self, results: Mapping[int, Result], asked: int) -> bool:
        """Return True if a round need not be waited for any more.

        Args:
            results: those that came, by the request's place in the round.
            asked: the number of the round's requests.
        """
        for place in range(asked):
            if place not in results:
                return False
            if self.same(results[place]):
                return True  # the others are larger
        return True

    def rounds(self) -> Rounds:
        """Yield the requests to judge, round by round, until nothing smaller is left to try.

        Results that did not come in time, or that :meth:`settled` needs not, are None.
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
        """Return in one line what is known so far."""
        if self.failure is None:
            return "how the kernel fails is not known yet"
        best = self._best or self._first
        return f"{self.failure.category}" + (f": fails on {words_of(best.tensors)}" if best is not None else "")

    def report(self, seconds: float = 0.0, ended: Ended | None = None) -> Report:
        """Return what is known now.

        Args:
            seconds: how long it took.
            ended: ``time`` or ``interrupted``, if that ended it; None if :meth:`rounds` has ended by itself.

        Raises:
            ValueError: nothing was judged and no failure was given.
        """
        failure = self.failure
        if failure is None:
            raise ValueError("nothing is known of the kernel")
        if (refusal := refused(failure)) is not None:
            ended = Ended.REFUSED
        elif ended is None:
            again = self._first is not None
            ended = Ended.SMALLEST if self._done else Ended.EVALUATIONS if again else Ended.NOT_AGAIN
        best = self._best or self._first
        problem = self._source(best.case) if best is not None else None
        shown = best.result if best is not None else failure
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
            else repro.render(self._hurried_request, problem, best.result, best.case.seeds, self._words(best)),
        )

    def _confirm(self) -> Generator[list[Request], Sequence[Result | None], bool]:
        """Judge the problem as it is: without timing, and if the kernel does not fail so, all as it was asked for."""
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
                self._first = _Found(self._own, result)
                self._timed = settings.timing.enabled
                return True
            if settings.timing.enabled or not request.settings.timing.enabled:
                self.failure = self.failure or result
                return False
        return False

    def _start(self) -> Generator[list[Request], Sequence[Result | None], None]:
        """Find the inputs on which the kernel fails under fixed seeds, and then small sizes for all numbers at once."""
        assert self.failure is not None
        kind = self.failure.facts.kind
        fixed = replace(self._own, seeds=_SEEDS)
        if kind is None or kind == _GIVEN:
            if (yield from self._try(self._joint(fixed))) or (yield from self._try([fixed])):
                return
        else:
            # The kernel is right on the problem's own draws, or its verdict would say so.
            like = (*inputs.LIKE.get(kind, inputs.LIKE_OTHERS), *inputs.PLAIN)
            if (yield from self._try(replace(fixed, fill=fill) for fill in like)):
                assert self._best is not None
                yield from self._try(self._joint(self._best.case))
                return
        yield from self._try(self._joint(self._own))
        self._best = self._best or self._first

    def _joint(self, case: Case) -> Iterator[Case]:
        """Yield the case with all sizes smaller at once, the smallest first."""
        most = max(case.sizes, default=1)
        for cap in _CAPS:
            if cap < most:
                yield replace(case, sizes=tuple(min(size, cap) for size in case.sizes))
        divisor = 1 << max(0, most.bit_length() - 1)
        while divisor > 1:
            yield replace(case, sizes=tuple(max(1, size // divisor) for size in case.sizes))
            divisor //= 2

    def _refine(self) -> Generator[list[Request], Sequence[Result | None], None]:
        """Shrink numbers that were equal together, and then each alone, until none can be smaller."""
        equal: dict[int, list[int]] = {}
        for place, size in enumerate(self._own.sizes):
            equal.setdefault(size, []).append(place)
        groups = [places for places in equal.values() if len(places) > 1]
        groups += [[place] for place in range(len(self._own.sizes))]
        shrunk = True
        while shrunk:
            shrunk = False
            for places in sorted(groups, key=lambda places: -max(self._sizes(places))):
                shrunk |= yield from self._bisect(places)

    def _sizes(self, places: Sequence[int]) -> list[int]:
        assert self._best is not None
        return [self._best.case.sizes[place] for place in places]

    def _bisect(self, places: Sequence[int]) -> Generator[list[Request], Sequence[Result | None], bool]:
        """Make some numbers smaller: at once as small as can be, else by bisection with odd neighbours."""
        shrunk = False
        high = max(self._sizes(places))
        if (yield from self._try(self._with(places, (v for v in _SMALLEST if v < high)))):
            return True
        low = _SMALLEST[-1]
        while high - low > 1:
            ratio = (high / low) ** (1 / (self._width + 1))
            middles = {min(max(round(low * ratio**step), low + 1), high - 1) for step in range(1, self._width + 1)}
            # A tail shows at odd sizes, which lie beside the middle.
            middles |= {middle + 1 for middle in middles if middle + 1 < high}
            tried = sorted(middles)
            if (yield from self._try(self._with(places, tried))):
                shrunk = True
                high = max(self._sizes(places))
                low = max([low, *(value for value in tried if value < high)])
            else:
                low = tried[-1]
        return shrunk

    def _with(self, places: Sequence[int], values: Iterable[int]) -> Iterator[Case]:
        assert self._best is not None
        case = self._best.case
        for value in values:
            changed = (min(size, value) if place in places else size for place, size in enumerate(case.sizes))
            yield replace(case, sizes=tuple(changed))

    def _simplify(self) -> Generator[list[Request], Sequence[Result | None], None]:
        """Make the inputs plainer: the same value everywhere, one input set, one element that is not 0."""
        assert self._best is not None
        case = self._best.case
        if not case.seeds:
            return
        one = case.seeds[:1]
        wanted = inputs.PLAIN if self._best.elements > 1 else inputs.PLAIN[:2]
        floats = any("float" in tensor.dtype for tensor in self._best.tensors)
        if case.fill not in inputs.PLAIN and floats:
            yield from self._try(replace(case, seeds=one, fill=fill) for fill in wanted)
        if len(self._best.case.seeds) > 1:
            # A kernel that keeps an answer needs two sets.
            single = [replace(case, seeds=(seed,)) for seed in case.seeds]
            yield from self._try([*single, replace(case, seeds=case.seeds[:2])])
        if self._best.case.fill in inputs.PLAIN or not floats:
            return
        begin, end = 0, self._best.elements
        while end - begin > 1:
            middle = (begin + end) // 2
            halves = [(begin, middle), (middle, end)]
            if not (yield from self._try(replace(self._best.case, keep=half) for half in halves)):
                return
            assert self._best.case.keep is not None
            begin, end = self._best.case.keep

    def _try(self, cases: Iterable[Case]) -> Generator[list[Request], Sequence[Result | None], bool]:
        """Have cases judged in their order, and keep the first that fails in the same way. Return whether one does."""
        fresh = iter([case for case in dict.fromkeys(cases) if case not in self._tried])
        while chunk := list(islice(fresh, self._width)):
            self._tried.update(chunk)
            results = yield from self._ask([self._ask_for(case) for case in chunk])
            for case, result in zip(chunk, results, strict=True):
                if result is not None and self.same(result):
                    found = _Found(case, result)
                    # A plainer or smaller case; sizes that made the inputs larger would be neither.
                    if self._best is None or found.size <= self._best.size:
                        self._best = found
                        return True
        return False

    def _ask(
        self, requests: list[Request]
    ) -> Generator[list[Request], Sequence[Result | None], Sequence[Result | None]]:
        made = requests[: self._most - self.evaluations]
        if not made:
            raise _Spent
        results = list((yield made))
        self.evaluations += len(made)
        return results + [None] * (len(requests) - len(results))

    def _ask_for(self, case: Case) -> Request:
        """Return the request to judge a case: for what is right or wrong about it, in little time."""
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

    @property
    def _hurried_request(self) -> Request:
        return self._request.model_copy(update={"settings": self._hurried(self._request.settings)})

    def _hurried(self, settings: Settings) -> Settings:
        """Wait less long for what is expected to hang."""
        if self.failure is None or self.failure.category is not Category.TIMEOUT:
            return settings
        limits = {name: min(seconds, _HANG_S) for name, seconds in settings.deadlines if name != "reference_s"}
        return settings.model_copy(update={"deadlines": settings.deadlines.model_copy(update=limits)})

    def _source(self, case: Case) -> str:
        source = sizes.rewrite(self._request.problem, self._numbers, case.sizes)
        return inputs.fixed(source, case.seeds, case.fill, case.keep) if case.seeds else source

    def _changes(self, case: Case) -> Iterator[Change]:
        for number, size in zip(self._numbers, case.sizes, strict=True):
            if size != number.value:
                yield Change(line=number.line, name=number.name, before=number.value, after=size)

    def _words(self, best: _Found) -> str:
        """Return how the problem was shrunk, for people."""
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
    """Return why a result needs no autopsy; None if it does."""
    if result.passed:
        return "the kernel passed: there is no failure to look into"
    if not result.judged:
        return f"{result.category}: this says nothing about the kernel ({result.message})"
    if result.evidence.tests is not None:
        return "it is of a repository's tests, and no kernel: pytest's report has all there is"
    if result.category not in SHRUNK or result.phase in _EARLY:
        return f"{result.category}: inputs and their sizes do not decide this failure; its verdict has all there is"
    return None


def _untimed(settings: Settings) -> Settings:
    return settings.model_copy(update={"timing": settings.timing.model_copy(update={"enabled": False})})


def _signature(result: Result) -> tuple[object, ...]:
    """Return what makes two failures the same: not a value, and no text that a kernel could print."""
    facts = result.facts
    raised = (facts.exception, facts.cuda_code, last_frame(result.log)) if facts.exception is not None else None
    return (
        result.category,
        result.phase,
        raised,
        facts.signal,
        facts.exit_status,
        facts.reason,
        facts.output,
        facts.input,
    )


def _checks(case: Case) -> int:
    """Return how many checks hardly miss the sets on which a kernel fails: the judge's seeds choose among all."""
    # Eight miss three of eight sets in one evaluation of 43, and one of two in one of 256. Small ones cost nothing.
    return len(_SEEDS) * (_OFTEN if math.prod(case.sizes) <= _SMALL else 1)
