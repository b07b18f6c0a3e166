"""Compare a candidate's outputs with the reference's.

There are two verdicts. KernelBench's is ``torch.allclose`` on the problem's own inputs, for the values that ``forward``
returns. Other projects' protocols (:mod:`kqueue.profiles`) are reported too. The strict verdict requires of every
output tensor, and of inputs and registered buffers that the reference changes:

* Every value is within the tolerance. A value beyond it is excused only if the reference itself does no better for
  values of that size, as after cancellation. See :mod:`~workers.judge.pipeline.rounding`.
* All values together, and the values of each size, are closer to the reference than zeros or the reference's mean would
  be. If the reference is tiny or nearly constant, such answers are within the tolerance of each value.
* Integers are equal, at a step, or indices that select the same values. See :mod:`~workers.judge.pipeline.choices`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch

from kqueue.categories import Category
from kqueue.contract import Comparison, Phase, Settings, Tolerance
from kqueue.evidence import ErrorFigures, WrongLocation, WrongMap
from kqueue.profiles import RULES, Rule
from workers.judge.channel.bits import same_bits
from workers.judge.channel.marks import unwritten
from workers.judge.ending import EvaluationEnded
from workers.judge.gpu import onepass
from workers.judge.pipeline import choices, likeness, rounding
from workers.judge.pipeline.cases import CLOSE, DTYPES, GIVEN, Case, comparable, differ, numbers
from workers.judge.pipeline.evidence import Compared, Figures, wrong_map
from workers.judge.pipeline.grades import GRADES, Grade, epsilon_for, given_for, grade_for, tolerance_for

#: Ratio of the output's error to the reference's own that suggests a lower precision.
_COARSE: Final = 32.0
#: Distance relative to the spread of the reference's values around their mean from which the spread is tested.
_FROM_MEAN: Final = 0.5
#: Share of values that are far off relative to their own size from which each size is tested.
_FAR_OFF: Final = 1 / 64
_SHOWN: Final = 5
#: Number of values to compare at a time on a GPU and on a CPU, to bound memory.
_CHUNK: Final = 1 << 24
_HOST_CHUNK: Final = 1 << 20
#: Share of a gradient's values at which it can jump, and factor of the known jumps that bounds an error there.
_JUMPING: Final = 1 / 4
_JUMPS: Final = 2.0
#: Share of the values of another output of a fine dtype that can be at steps, as of a rounding, and such an epsilon.
_STEPPING: Final = 1 / 32
_FINE: Final = torch.finfo(torch.float32).eps
#: Share of the values of an integer output that can be at steps, such as the halves of a quantization. One always can.
_AT_STEPS: Final = 2.0**-16


def check_values(outputs: list[torch.Tensor], case: Case, settings: Settings) -> Compared:
    """Compare delivered outputs, of the reference's shapes, dtypes and devices, with the reference's.

    Returns:
        The worst figures of all outputs, and the faults by each profile.

    Raises:
        EvaluationEnded: ``not_finite`` or ``wrong_values`` by the verdict that ``settings.comparison`` chooses,
            with the kind of inputs, the same figures, the first wrong positions, and a map of all of them.
    """
    [verdict] = check_each([(outputs, case)], settings)
    try:
        if isinstance(verdict, EvaluationEnded):
            raise verdict
        return verdict
    finally:
        del verdict  # Otherwise this frame and the error hold each other, and large outputs with them.


def differences(
    outputs: Sequence[torch.Tensor], refs: Sequence[torch.Tensor], case: Case, settings: Settings, *, times: float = 1.0
) -> list[Figures]:
    """Return the figures of outputs, including empty ones, without a verdict.

    Args:
        refs: the tensors to compare the outputs with.
        case: source of the problem's tolerance.
        times: factor of the tolerance.
    """
    pair = replace(case, slot=None, inputs=[], outputs=list(refs), exact=None, noise=[])
    judged = [_Output.of(i, output, pair, settings) for i, output in enumerate(outputs)]
    for output in judged:
        allowed = output.tolerance
        output.tolerance = output.loose = allowed.model_copy(
            update={"atol": times * allowed.atol, "rtol": times * allowed.rtol}
        )
    _measure_all([output for output in judged if output.ref.numel()])
    return [output.figures for output in judged]


def check_each(
    answers: Sequence[tuple[list[torch.Tensor], Case]], settings: Settings
) -> list[Compared | EvaluationEnded]:
    """Return the result or the error of :func:`check_values` for each of many calls, and wait for the device once."""
    calls = _measured(answers, settings)
    return [_verdict(judged, *answer, settings) for judged, answer in zip(calls, answers, strict=True)]


def by_profiles(outputs: list[torch.Tensor], case: Case, settings: Settings) -> dict[str, str]:
    """Return the fault of answers in ``eval()`` mode, or an empty text, for each profile that compares in that mode."""
    [judged] = _measured([(outputs, case)], settings)
    return _by_profiles(judged, settings, evaluates=True)


def _by_profiles(returned: Sequence[_Output], settings: Settings, *, evaluates: bool = False) -> dict[str, str]:
    """Return the first fault by each profile, or an empty text."""
    rules = {str(name): rule for name in settings.profiles if (rule := RULES[name]).evaluates is evaluates}
    return {
        name: next((fault for output in returned if (fault := output.profile_fault(rule, settings))), "")
        for name, rule in rules.items()
    }


def same_outputs(outputs: list[torch.Tensor], case: Case, settings: Settings) -> list[bool]:
    """Return for each output whether it would be right in the place of the reference's, by the deciding verdict."""
    [judged] = _measured([(outputs, case)], settings)
    is_same = [True] * len(outputs)
    for output in judged:
        # The reference need not be asked for another answer if the known ones differ by more than rounding errors.
        is_strict, errors = settings.comparison is Comparison.STRICT, output.errors()
        differs = output.figures.wrong and (errors is None or errors[0] > rounding.LENIENCE * errors[1])
        fault = output.strict_fault() if is_strict and not differs else output.kernelbench_fault()
        is_same[output.number] = fault is None and not (is_strict and differs)
    return is_same


def need_no_excuse(answers: Sequence[tuple[list[torch.Tensor], Case]], settings: Settings) -> list[bool]:
    """Return whether each call is right without float64 outputs, which could excuse it, and a check of the problem."""
    alone = [(outputs, replace(case, again=None, moved=tuple)) for outputs, case in answers]
    excused = [any(output.needs_excuse(settings) for output in judged) for judged in _measured(alone, settings)]
    return [case.check is None and not needs for needs, (_, case) in zip(excused, answers, strict=True)]


def _measured(answers: Sequence[tuple[list[torch.Tensor], Case]], settings: Settings) -> list[list[_Output]]:
    """Return the non-empty outputs of each call with their figures."""
    calls = [
        [
            _Output.of(i, outputs[i], case, settings)
            for i in range(len(outputs))
            if outputs[i].numel() and i not in case.form.unkept
        ]
        for outputs, case in answers
    ]
    _measure_all([output for judged in calls for output in judged])
    return calls


def _measure_all(outputs: Sequence[_Output]) -> None:
    """Measure non-empty outputs, and wait for the device once, unless some values are not finite."""
    if not outputs:
        return
    for output, measures in zip(outputs, torch.stack([each.measure() for each in outputs]).tolist(), strict=True):
        if not all(map(math.isfinite, measures)):
            measures = output.measure(all_finite=False).tolist()
        output.figures = Figures(*measures)


def _verdict(
    judged: Sequence[_Output], outputs: list[torch.Tensor], case: Case, settings: Settings
) -> Compared | EvaluationEnded:
    """Return the figures of one call, or the error that ends the evaluation."""
    given = case.kind == GIVEN
    for output in judged:
        if case.form.is_gradient(output.number):
            output.skip_jumps(case.moved, sums=True)
    returned = [output for output in judged if case.form.is_returned(output.number)]
    loose = next((fault for output in returned if (fault := output.kernelbench_fault())), None)
    faults = _by_profiles(returned, settings) if given else {}
    for output in returned:
        if output.figures.wrong and not output.epsilon:
            whole, of = (outputs, case) if case.restore is None else case.restore(outputs)
            if choices.are_right(whole, output.number, of, CLOSE[settings.precision]):
                output.figures = Figures(*[0.0] * 13)
            elif not choices.are_tied(whole, output.number, of):
                output.skip_steps(case.moved())
        elif case.check is None and not case.form.is_gradient(output.number) and output.needs_steps():
            output.skip_jumps(case.moved, sums=False)
    strict = None
    own = [output.number for output in returned if case.check is not None and not case.form.is_gradient(output.number)]
    for output in judged:
        fault = output.illegible_fault() if output.number in own else output.strict_fault()
        if fault is not None and not case.form.is_unkept(output.number, outputs[output.number]):
            strict = strict or fault
    if strict is None and own and case.check is not None and (words := case.check(case, outputs)):
        strict = returned[0].refused(words)
    errors = _merged(
        [output for output in judged if output.number not in case.form.unkept],
        given=given and not own,
        strict=strict is None,
        loose=loose is None if given else None,
    )
    fault = strict if settings.comparison is Comparison.STRICT else loose
    if fault is not None:
        where = "" if given else f" on {case.kind} inputs"
        [output] = [output for output in judged if output.number == fault.output]
        category, message, count = _unless_unwritten(output, fault)
        causes: dict[str, Any] = {"unwritten": count} if count else {}
        if fault.first and not output.epsilon and case.form.is_returned(output.number):
            whole, of = (outputs, case) if case.restore is None else case.restore(outputs)
            if choices.are_tied(whole, output.number, of):
                causes["ties_only"] = True
        ended = EvaluationEnded(
            category,
            f"{fault.subject or case.form.name(fault.output)}{where}: {message}",
            Phase.CHECK,
            kind=case.kind,
            map=fault.map(),
            likeness=likeness.words(output.out, output.ref, output.shape, fault.where),
            effect=case.form.effect(fault.output),
            errors=errors,
            **fault.facts(),
            **causes,
        )
        ended.faults = faults
        return ended
    return Compared(errors, faults)


def _unless_unwritten(output: _Output, fault: _Fault) -> tuple[Category, str, int]:
    """Return the category and the message of a fault, and the number of values that the kernel never wrote.

    The judge marks memory by NaN or by a number, depending on the dtype and the call. So values that were never written
    are ``wrong_values``, and only values that a kernel computed are ``not_finite``.
    """
    count, strays, first = output.unwritten()
    if not count or fault.subject:
        return fault.category, fault.message, 0
    told = f"{count} of {output.ref.numel()} values were never written, the first at {unravel(first, output.shape)}"
    if fault.category is Category.NOT_FINITE and strays == fault.wrong:
        return Category.WRONG_VALUES, told, count
    return fault.category, f"{told}. {fault.message}" if fault.message else told, count


@dataclass(frozen=True, slots=True)
class _Fault:
    """Reason why an output is wrong."""

    category: Category
    message: str
    output: int
    first: list[WrongLocation]
    wrong: int
    of: int
    #: Maps the wrong values. This takes a pass over the output, so only the reported fault's map is made.
    map: Callable[[], WrongMap | None]
    #: Returns where values are wrong.
    where: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    #: Beginning of the message, or empty for the output's name.
    subject: str = ""

    def facts(self) -> dict[str, Any]:
        return {"output": self.output, "wrong": self.wrong, "of": self.of, "first": self.first}


@dataclass(slots=True)
class _Output:
    """One output and the reference's output."""

    number: int
    out: torch.Tensor
    ref: torch.Tensor
    exact: torch.Tensor | None
    noise: float | None
    #: Returns the reference's outputs to inputs changed by about a rounding error, or None.
    again: Callable[[], list[torch.Tensor] | None] | None
    shape: tuple[int, ...]
    #: Product of all dimensions but the last.
    rows: int
    tolerance: Tolerance
    loose: Tolerance
    #: True if the judge made the inputs, which can be nearly equal then.
    is_variant: bool
    #: None if values must be equal, or the evaluation sets its own tolerance.
    grade: Grade | None
    #: Relative errors that a lower precision explains, whatever the tolerance.
    lower: tuple[float, float] | None
    epsilon: float
    #: Relative error from which a value is far off.
    far: float
    figures: Figures
    #: Number of values that a jump of the reference excuses.
    jumps: int = 0

    @classmethod
    def of(cls, number: int, out: torch.Tensor, case: Case, settings: Settings) -> _Output:
        ref = case.outputs[number]
        floating = ref.dtype in GRADES
        asked, own = (given_for(given, number) for given in (settings.given_tolerance, case.tolerance))
        grade = grade_for(ref.dtype, settings, own) if floating and asked is None else None
        loose = CLOSE[settings.precision]  # KernelBench's tolerance depends on the precision, not the output's dtype.
        return cls(
            number,
            flat(out),
            flat(ref),
            flat(case.exact[number]).double() if case.exact is not None and floating else None,
            case.noise[number] if number < len(case.noise) and floating else None,
            case.again if floating else None,
            (*ref.shape, 2) if ref.is_complex() else tuple(numbers(ref).shape),
            math.prod(ref.shape[:-1]),
            tolerance_for(ref.dtype, settings, asked or own),
            asked or Tolerance(atol=loose, rtol=loose),
            case.kind != GIVEN,
            grade,
            grade_for(ref.dtype, settings).downgrade if floating else None,
            epsilon_for(ref.dtype, settings),
            math.inf if grade is None else 2 * grade.farthest,
            Figures(*[0.0] * 13),
        )

    def measure(self, *, all_finite: bool = True) -> torch.Tensor:
        """Return the fields of :class:`Figures` as a tensor on the device, without waiting for it.

        Assuming that all values are finite takes a third of the passes. If they are not, some figure is not finite.
        """
        must_equal = self.tolerance.atol == 0 == self.tolerance.rtol or self.loose.atol == 0 == self.loose.rtol
        if self.ref.is_cuda and not must_equal:
            bounds, loose = ((t.atol, t.rtol) for t in (self.tolerance, self.loose))
            if (numbers := onepass.measure(self.out, self.ref, self.exact, bounds, loose, self.far)) is not None:
                return numbers
        added: torch.Tensor | None = None
        largest: torch.Tensor | None = None
        measure = self._measure_finite if all_finite and not must_equal else self._measure_chunk
        for out, ref, exact in self._chunks():
            sums, maxima = measure(out, ref, exact)
            added = sums if added is None else added + sums
            largest = maxima if largest is None else torch.maximum(largest, maxima)
        assert added is not None
        assert largest is not None
        return torch.cat((added, largest))

    @property
    def _chunk(self) -> int:
        return _CHUNK if self.ref.is_cuda else _HOST_CHUNK

    def _chunks(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        for begin in range(0, self.ref.numel(), self._chunk):
            part = slice(begin, begin + self._chunk)
            yield self.out[part], self.ref[part], self.exact[part] if self.exact is not None else None

    def _measure_finite(
        self, out: torch.Tensor, ref: torch.Tensor, exact: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the sums of :meth:`_measure_chunk` for values that are all finite."""
        out, ref = comparable(out), comparable(ref)
        size, error = ref.abs(), (out - ref).abs_()
        wrong = unlike = (error > size.mul(self.tolerance.rtol).add_(self.tolerance.atol)).sum()
        if self.loose != self.tolerance:
            unlike = (error > size.mul(self.loose.rtol).add_(self.loose.atol)).sum()
        far_off = ((error > size * self.far) & (size > 0)).sum()
        zero = torch.zeros((), dtype=torch.float64, device=ref.device)
        norms = [_norm(error), _norm(ref), zero, zero, zero]
        if exact is not None:
            norms[2:] = [_norm(out - exact), _norm(ref - exact), _norm(exact)]
        numbers = [zero, wrong, unlike, far_off, zero + ref.numel(), ref.sum(dtype=torch.float64)]
        relative = torch.where(size == 0, 0.0, error / size).clamp_max_(torch.finfo(error.dtype).max)
        return (
            torch.cat((torch.stack([number.double() for number in numbers]), torch.stack(norms).square())),
            torch.stack((error.max(), relative.max())).to(torch.float64),
        )

    def _measure_chunk(
        self, out: torch.Tensor, ref: torch.Tensor, exact: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        same = _same(out, ref)
        out, ref = comparable(out), comparable(ref)
        size, finite, error = ref.abs(), ref.isfinite(), (out - ref).abs()
        stray = finite & ~out.isfinite()
        wrong = ~self._within(self.tolerance, same, error, size, finite)
        unlike = wrong if self.loose == self.tolerance else ~self._within(self.loose, same, error, size, finite)
        counted = finite & ~stray
        # The difference of two infinities is NaN. Values that are not finite are counted above.
        most = torch.finfo(error.dtype).max
        error = torch.where(counted, error, 0.0).clamp_max(most)
        value = torch.where(finite, ref, 0.0)
        relative = torch.where(value != 0, error / size, 0.0).clamp_max(most)
        far_off = counted & (error > size * self.far) & (size > 0)
        zero = torch.zeros((), dtype=torch.float64, device=ref.device)
        norms = [_norm(error), _norm(value), zero, zero, zero]
        if exact is not None:
            both_finite = counted & exact.isfinite()
            truth = torch.where(both_finite, exact, 0.0)
            norms[2:] = [
                _norm(torch.where(both_finite, out, 0.0) - truth),
                _norm(torch.where(both_finite, ref, 0.0) - truth),
                _norm(truth),
            ]
        counts = torch.stack((stray, wrong, unlike, far_off, finite)).sum(1, dtype=torch.float64)
        return (
            torch.cat((counts, value.sum(dtype=torch.float64).reshape(1), torch.stack(norms).square())),
            torch.stack((error.max(), relative.max())).to(torch.float64),
        )

    @staticmethod
    def _within(
        tolerance: Tolerance, same: torch.Tensor, error: torch.Tensor, size: torch.Tensor, finite: torch.Tensor
    ) -> torch.Tensor:
        if tolerance.atol == 0 == tolerance.rtol:
            return same  # 64-bit integers do not fit a float.
        # Where the reference is infinite, only the same infinity is correct.
        return same | (finite & (error <= tolerance.rtol * size + tolerance.atol))

    def skip_jumps(self, moved: Callable[[], Iterable[list[torch.Tensor]]], *, sums: bool) -> None:
        """Take the reference's values where it jumps for nearly equal inputs, like a rounding or a ReLU's gradient.

        A right kernel rounds otherwise, and can be on the other side: its value is one of the reference's for such
        inputs, or for ``sums`` of jumps an error of their size. More wrong values than a share stay wrong.
        """
        share = _JUMPING if sums else _STEPPING
        if not 0 < self.figures.wrong <= max(2, share * self.ref.numel()):
            return
        chunks = enumerate(self._beyond_of(out, ref, self.tolerance) for out, ref, _ in self._chunks())
        some = torch.cat([number * self._chunk + wrong.nonzero().flatten() for number, wrong in chunks])
        out, ref = comparable(self.out[some]), comparable(self.ref[some])
        bound = self.tolerance.atol + self.tolerance.rtol * ref.abs()
        jump, jumps = torch.zeros_like(bound), torch.zeros_like(bound, dtype=torch.bool)
        for answer in moved():
            other = comparable(flat(answer[self.number])[some])
            jump = torch.fmax(jump, (other - ref).abs())
            jumps |= self._within(self.tolerance, other == out, (other - out).abs(), other.abs(), other.isfinite())
        if sums:
            jumps = (jump > bound) & ((out - ref).abs() <= bound + _JUMPS * jump)
        if bool(jumps.any()):
            places = some[jumps]
            self.out, before = self.out.index_put((places,), self.ref[places]), self.figures.wrong
            _measure_all([self])
            self.jumps = int(before - self.figures.wrong)

    def skip_steps(self, moved: Iterable[list[torch.Tensor]]) -> None:
        """Count no integer as wrong if each wrong one is the reference's own for some nearly equal inputs."""
        left = ~_same(self.out, self.ref)
        for answer in moved if self.figures.wrong <= max(1, _AT_STEPS * self.ref.numel()) else ():
            left &= ~_same(self.out, flat(answer[self.number]))
            if not bool(left.any()):
                self.jumps, self.figures = int(self.figures.wrong), Figures(*[0.0] * 13)
                return

    def strict_fault(self) -> _Fault | None:
        """Return the strict verdict's fault, or None."""
        figures, tolerance, grade = self.figures, self.tolerance, self.grade
        if figures.strays:
            return self._not_finite()
        if self._too_many(figures.wrong, tolerance) and (grade is None or not self._are_excused(tolerance)):
            return self._beyond(tolerance, int(figures.wrong))
        if grade is None:
            return None
        resolution, enough = grade.resolution * self.epsilon, figures.finite >= rounding.ENOUGH
        is_far = figures.distance > grade.farthest * figures.size
        is_far |= figures.far_off >= max(rounding.ENOUGH, _FAR_OFF * figures.finite)
        is_unknown = self.is_variant and self.exact is None
        if is_far and is_unknown:  # Of such values many are large, and only the reference's own errors show how far.
            is_far = self.again is not None and self.again() is not None
        if is_far and not self._answers().agree_by_size(grade.farthest, grade.lenience, resolution):
            share = f"{figures.distance / figures.size:.3g}" if figures.size else "more than all"
            return self._together(
                "the reference's values are tiny:"
                f" the error is {share} times as large as they are, or more for values of one magnitude"
            )
        shifts = figures.distance > min(_FROM_MEAN * figures.spread, resolution * figures.size)
        # Sums of many nearly equal values have rounding errors that no change of the inputs shows. In 16 bits all of
        # a variant's values can be within one rounding error.
        is_close = self.ref.itemsize == 2 and figures.spread <= self.epsilon * figures.size
        is_vague = is_unknown or (self.is_variant and is_close)
        if enough and shifts and not is_vague and not self._answers().follow(self.shape, self.epsilon, resolution):
            return self._together(
                "the reference's values are nearly constant:"
                " their mean, altogether or along a dimension, would be as close to them"
            )
        return None

    def needs_steps(self) -> bool:
        """Return whether only steps of the reference can excuse values of a fine dtype."""
        is_fine = self.grade is not None and self.epsilon <= _FINE
        return is_fine and self._too_many(self.figures.wrong, self.tolerance) and not self._are_excused(self.tolerance)

    def illegible_fault(self) -> _Fault | None:
        """Return the fault for which the problem's check is not even asked: values never written, or NaN. Or None."""
        # Floats can have the first call's mark by chance, also -1.498 in 32 bits. Later calls mark by NaN.
        count = self.unwritten()[0] if self.out.itemsize > 2 and not self.out.is_floating_point() else 0
        strays = sum(int(comparable(out).isnan().sum()) for out, _, _ in self._chunks())
        if not (count or strays):
            return None
        message = f"{strays} of {self.ref.numel()} values are NaN, which the problem's check is not asked about"
        category = Category.WRONG_VALUES if count else Category.NOT_FINITE
        return self._fault(category, "" if count else message, count or strays, lambda out, ref: ~_same(out, ref))

    def refused(self, words: str) -> _Fault:
        """Return the fault that the problem's check refuses the outputs, which has no places."""
        count, subject = self.ref.numel(), "the problem's check() refuses the outputs"
        nowhere = partial(torch.zeros_like, dtype=torch.bool)
        return _Fault(
            Category.WRONG_VALUES,
            words,
            self.number,
            [],
            count,
            count,
            lambda: None,
            lambda out, _: nowhere(out),
            subject,
        )

    def _are_excused(self, tolerance: Tolerance) -> bool:
        """Return whether errors beyond a tolerance are no larger than the reference's own.

        A few values of one size can all have small errors by chance, so its errors with nearly equal inputs count too.
        """
        bounds = tolerance.atol, tolerance.rtol
        return self._answers().are_excused(*bounds) or (
            self.exact is not None and self._answers(nudged=True).are_excused(*bounds)
        )

    def _answers(self, *, nudged: bool = False) -> rounding.Answers:
        """Return the output with another answer of the reference, for which the reference is asked if needed.

        The other answer is the float64 answer if there is one, or if ``nudged`` the one to nearly equal inputs.
        """
        other, is_exact = (None, False) if nudged else (self.exact, self.exact is not None)
        if other is None and self.again is not None and (answer := self.again()) is not None:
            other = flat(answer[self.number])
            other = None if same_bits(other, self.ref) else other  # Nothing was rounded otherwise.
        return rounding.Answers(self.out, self.ref, other, is_exact)

    def needs_excuse(self, settings: Settings) -> bool:
        """Return whether float64 outputs, which can only excuse wrong outputs, could change the verdict."""
        if settings.comparison is not Comparison.STRICT:
            return self.kernelbench_fault() is not None
        return self.figures.wrong > 0 or self.strict_fault() is not None

    def kernelbench_fault(self) -> _Fault | None:
        """Return the fault by ``torch.allclose`` with KernelBench's tolerance, or None."""
        if self.figures.strays:
            return self._not_finite()
        too_many = self._too_many(self.figures.unlike, self.loose)
        return self._beyond(self.loose, int(self.figures.unlike)) if too_many else None

    def _too_many(self, wrong: float, tolerance: Tolerance) -> bool:
        """Return whether more values are beyond a tolerance than its matched ratio allows."""
        return wrong > (1 - tolerance.matched_ratio) * self.ref.numel()

    def profile_fault(self, rule: Rule, settings: Settings) -> str:
        """Return the fault by the rule of a profile, or an empty text."""
        dtype = self.ref.dtype if rule.by_output else DTYPES[settings.precision]
        atol, rtol, share = rule.bound(str(dtype).removeprefix("torch."))
        wrong, values = self._beyond_rule(Tolerance(atol=atol, rtol=rtol), either=rule.either), self.ref.numel()
        if wrong <= (1 - share) * values:
            return ""
        word = "and" if rule.either else "+"
        return (
            f"output {self.number}: {wrong} of {values} values differ by more than {atol:g} {word} {rtol:g}·|reference|"
        )

    def _beyond_rule(self, bound: Tolerance, *, either: bool) -> int:
        """Return the number of values beyond a tolerance, without another pass if a known number decides it."""
        figures, parts = self.figures, 2 if either else 1
        for known, count in ((self.loose, figures.unlike), (self.tolerance, figures.wrong)):
            if known == bound and not either:
                return int(count)
            is_narrower = parts * known.atol <= bound.atol and parts * known.rtol <= bound.rtol
            if is_narrower and not count and figures.finite == self.ref.numel():
                return 0
        return sum(int(self._beyond_of(out, ref, bound, either=either).sum()) for out, ref, _ in self._chunks())

    def unwritten(self) -> tuple[int, int, int]:
        """Return the number of values that were never written, of those that are not finite, and the first position."""
        count = strays = first = 0
        for number, (out, ref, _) in enumerate(self._chunks()):
            positions = unwritten(out, ref)
            if len(positions):
                first = first if count else number * self._chunk + int(positions[0])
                out, ref = comparable(out[positions]), comparable(ref[positions])
                count, strays = count + len(positions), strays + int((ref.isfinite() & ~out.isfinite()).sum())
        return count, strays, first

    def errors(self) -> tuple[float, float, float] | None:
        """Return the output's error, the reference's own, and the norm of the answer, or None if they are unknown."""
        figures = self.figures
        if self.exact is not None:
            return figures.astray2**0.5, figures.own2**0.5, figures.truth2**0.5
        if self.noise is not None:
            return figures.distance, self.noise * figures.size, figures.size
        return None

    def ratio(self) -> float | None:
        """Return the output's error divided by the reference's own error, which is at least a rounding error."""
        if (errors := self.errors()) is None:
            return None
        astray, own, size = errors
        own = max(own, self.epsilon / 4 * size)
        return astray / own if own else None if astray else 1.0

    def downgraded(self) -> bool:
        """Return whether a lower precision than the reference's, and nothing simpler, explains the error."""
        ratio, errors, figures = self.ratio(), self.errors(), self.figures
        if ratio is None or errors is None or self.lower is None:
            return False
        if figures.strays or figures.finite < self.ref.numel():
            return False
        least, most = (bound * errors[2] for bound in self.lower)
        return (
            ratio >= _COARSE
            and least <= errors[0] <= most
            and rounding.are_coarse(self.out, self.ref, self.exact, self.noise, self.epsilon)
        )

    def _beyond_of(
        self, out: torch.Tensor, ref: torch.Tensor, tolerance: Tolerance, *, either: bool = False
    ) -> torch.Tensor:
        same = _same(out, ref)
        out, ref = comparable(out), comparable(ref)
        if either:
            error = (out - ref).abs()
            return ((error > tolerance.atol) & (error > tolerance.rtol * ref.abs())) | ~out.isfinite()
        return ~self._within(tolerance, same, (out - ref).abs(), ref.abs(), ref.isfinite())

    def _not_finite(self) -> _Fault:
        count = int(self.figures.strays)
        message = f"{count} of {self.ref.numel()} values are not finite where the reference's are"
        return self._fault(Category.NOT_FINITE, message, count, lambda out, ref: ref.isfinite() & ~out.isfinite())

    def _beyond(self, tolerance: Tolerance, count: int) -> _Fault:
        fault = self._fault(Category.WRONG_VALUES, "", count, lambda out, ref: self._beyond_of(out, ref, tolerance))
        exactly = tolerance.atol == 0 == tolerance.rtol
        limit = "" if exactly else f" by more than {tolerance.atol:g} + {tolerance.rtol:g}·|reference|"
        most = f"at most by {self.figures.max_abs:.6g}"
        # Errors are measured where both values are finite, so infinite references have none. On a GPU the count comes
        # from another kernel than the positions, which can be none at a limit.
        if self.figures.max_abs == 0 and fault.first:
            one = fault.first[0]
            most = f"the first is {one.got:.6g} instead of {one.expected:.6g}"
        if tolerance.matched_ratio < 1:
            most += f". At least {tolerance.matched_ratio:.6g} of all must be within"
        return replace(fault, message=f"{count} of {self.ref.numel()} values differ{limit}, {most}")

    def _together(self, why: str) -> _Fault:
        if self._too_many(self.figures.wrong, self.tolerance):  # Each alone is excused, but not all together.
            return self._beyond(self.tolerance, int(self.figures.wrong))
        message = f"every value is within the tolerance, but only because {why}"
        return self._fault(Category.WRONG_VALUES, message, self.ref.numel(), lambda out, ref: ~_same(out, ref))

    def _fault(
        self, category: Category, message: str, count: int, where: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> _Fault:
        first: list[WrongLocation] = []
        for number, (out, ref, _) in enumerate(self._chunks()):
            for position in where(out, ref).nonzero()[: _SHOWN - len(first), 0].tolist():
                expected, got = float(comparable(ref[position])), float(comparable(out[position]))
                index = unravel(number * self._chunk + position, self.shape)
                first.append(WrongLocation(index=tuple(index), expected=expected, got=got))
            if len(first) >= _SHOWN:
                break
        return _Fault(
            category,
            message,
            self.number,
            first,
            count,
            self.ref.numel(),
            partial(wrong_map, self.out, self.ref, self.rows, where),
            where,
        )


def _merged(judged: Sequence[_Output], *, given: bool, strict: bool, loose: bool | None) -> ErrorFigures:
    """Return the worst figures of all outputs, with both verdicts. A downgrade is found for given cases only."""
    ratios = [ratio for output in judged if (ratio := output.ratio()) is not None]
    norms = [output.figures.distance / output.figures.size for output in judged if output.figures.size]
    return ErrorFigures(
        max_abs_error=max((output.figures.max_abs for output in judged), default=0.0),
        max_rel_error=max((output.figures.max_rel for output in judged), default=0.0),
        relative_norm=max(norms, default=0.0),
        error_ratio=max(ratios, default=None),
        precision_downgrade=given and any(output.downgraded() for output in judged),
        jumps=sum(output.jumps for output in judged),
        strict_correct=strict,
        kernelbench_correct=loose,
    )


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return all values in one dimension, complex ones as two."""
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else numbers(tensor)).reshape(-1)


def _same(out: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """Return where values are equal. Compares 64-bit integers before they become floats."""
    if not out.is_floating_point():
        return ~differ(out, ref)
    return out == ref if out.dtype.itemsize > 1 else comparable(out) == comparable(ref)


def _norm(values: torch.Tensor) -> torch.Tensor:
    """Return the Euclidean norm, in float64 without a float64 copy of the values."""
    return torch.linalg.vector_norm(values, dtype=torch.float64)


def unravel(flat: int, shape: tuple[int, ...]) -> list[int]:
    """Return the index in a tensor of this shape of the value at a flat position."""
    index: list[int] = []
    for size in reversed(shape):
        flat, coordinate = divmod(flat, size)
        index.insert(0, coordinate)
    return index
