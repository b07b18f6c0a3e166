"""Further sizes: a kernel that passed is judged on other sizes of its problem, drawn at random.

Its problem can be rewritten if its sizes are numbers in its source (:func:`kqueue.shapes.sizes_of`). The reference
decides whether they are in the problem's domain. Times are not taken.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Final

from kqueue import shapes
from kqueue.categories import Blame, Category
from kqueue.contract import Examination, Outcome, Phase, Policy, Request
from kqueue.evidence import SIZES_RULE, Facts, Finding, Severity

#: Smaller numbers are often strides, counts of layers or sizes of a convolution's kernel, which decide its algorithm.
_LEAST: Final = 16
_CHANGES: Final[tuple[Callable[[int], int], ...]] = (
    lambda size: size // 2,
    lambda size: size - random.SystemRandom().randrange(1, 16, 2),  # an odd tail behind a multiple of a block
    lambda size: 2 * size,
)
#: Number of draws for each change, because the reference can refuse some.
_TRIES: Final = shapes.FURTHER // len(_CHANGES)
#: Categories that show a limit of resources rather than a wrong kernel.
_LIMITS: Final = frozenset(
    {Category.TIMEOUT, Category.COMPILE_TIMEOUT, Category.GPU_OUT_OF_MEMORY, Category.HOST_OUT_OF_MEMORY}
)


def judge_further(request: Request, judge: Callable[[Request], Outcome]) -> Callable[[Outcome], Outcome]:
    """Judge other sizes with ``judge``, until the kernel fails.

    Returns:
        A function that adds the result to the outcome of a kernel that passed. A failure of the fleet on other sizes
        takes the outcome's place, so that all is tried again.
    """
    settings = request.settings
    untimed = settings.model_copy(update={"timing": settings.timing.off(), "examine": Examination()})
    right: list[str] = []
    for change in _CHANGES:
        for words, problem in _drawn(request.problem, change):
            found = judge(request.model_copy(update={"problem": problem, "settings": untimed}))
            if found.blame is Blame.FLEET:
                return lambda _, found=found: found
            if found.blame is Blame.CANDIDATE and found.category not in _LIMITS:
                return functools.partial(_labelled, policy=settings.policies.shapes, words=words, found=found)
            if found.passed:
                right.append(words)
                break
    evidence = {"sizes": tuple(right)}
    return lambda outcome: outcome.model_copy(update={"evidence": outcome.evidence.model_copy(update=evidence)})


def _drawn(source: str, change: Callable[[int], int]) -> Iterator[tuple[str, str]]:
    """Yield problems with other sizes, and the change in words: all sizes at once, and then some of one value."""
    numbers = shapes.sizes_of(source)
    values = {number.value for number in numbers if number.value >= _LEAST}
    single = random.SystemRandom().sample(sorted(values), min(_TRIES - 1, len(values)))
    for some in (values, *({value} for value in single if len(values) > 1)):
        new = {value: change(value) for value in some}
        words = {
            f"{number.name}: {new[number.value]} instead of {number.value}" for number in numbers if number.value in new
        }
        if words:
            every = [new.get(number.value, number.value) for number in numbers]
            yield ", ".join(sorted(words)), shapes.with_sizes(source, numbers, every)


def _labelled(outcome: Outcome, policy: Policy, words: str, found: Outcome) -> Outcome:
    meaning = f"the kernel is right on the problem's own sizes, and with another it ends as {found.category}"
    evidence = f"{words}: {found.message}"[:500]
    finding = Finding(
        rule=SIZES_RULE, severity=Severity.NOTE, line=None, evidence=evidence, by="kqueue", meaning=meaning
    )
    before = outcome.evidence
    after = before.model_copy(update={"findings": (*(before.findings or ()), finding)})
    if policy is not Policy.REJECT:
        message = outcome.message.removesuffix(before.doubts) + after.doubts
        return outcome.model_copy(update={"evidence": after, "message": message})
    return Outcome(
        category=Category.REJECTED_BY_POLICY,
        message=f"{meaning}: {evidence}",
        phase=Phase.CHECK,
        facts=Facts(findings=(finding,)),
        log=outcome.log,
        evidence=after,
    )
