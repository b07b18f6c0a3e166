"""Stage ``refer``: the reference imports the problem, draws inputs and answers them.

None of the kernel's code runs yet, so that it cannot disturb the reference.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from kqueue.contract import Phase
from kqueue.evidence import Checker
from kqueue.passes import Pass
from workers.judge.channel.randomness import LARGER
from workers.judge.pipeline import answers, clocks, compare, plan, sensitivity, timing
from workers.judge.pipeline.baseline import Baseline
from workers.judge.pipeline.cases import GIVEN, Case
from workers.judge.pipeline.context import Context, Grant
from workers.judge.pipeline.reference import Reference


@dataclass(frozen=True, slots=True)
class Referenced:
    """Everything that is known before any of the kernel's code runs.

    Attributes:
        first: the first given case, which is answered.
        cases: the cases to check now, the first one included.
        later: number of given cases to draw later.
        last: the case for after the timing, or None to draw one if it is needed.
        variants: hidden variants for the timed calls. Small ones are answered.
        baseline: the reference's time, or None if the kernel is not to be timed.
    """

    reference: Reference
    first: Case
    cases: tuple[Case, ...]
    later: int
    last: Case | None
    variants: tuple[Case, ...]
    baseline: Baseline | None


def refer(context: Context) -> Referenced:
    """Make the reference draw inputs and compute answers, and choose the clock that can time it."""
    on_gpu, timed = context.slot.on_gpu, context.settings.timing.enabled
    if on_gpu:
        context.evidence.tf32 = context.settings.tf32
    with context.steps.backstop(Phase.REFERENCE):
        context.processes.begin_reference()
    with _warming_up(context):
        reference, first = _begin(context)
        cases, last, variants = _answer(context, reference, first)
    if timed and context.instruments is None:
        context.instruments = clocks.Instruments(context.watch)
        if on_gpu:
            context.instruments = clocks.Instruments(context.watch, clocks.Hold(), flusher := clocks.Flusher())
            flusher()
    baseline = Baseline(context, reference, lambda: recall(context, reference, first)[0]) if timed else None
    if baseline is not None:
        baseline.choose_clock()
    later = 0 if reference.cache.is_roomy else context.settings.checks - 1
    return Referenced(reference, first, tuple(cases), later, last, tuple(variants), baseline)


def recall(context: Context, reference: Reference, first: Case) -> tuple[Reference, Case]:
    """Return a shape's reference and its first case, made again if the process has another shape.

    No kernel runs any more.
    """
    found = context.recalled or (reference, first)
    if context.processes.reference is not found[0]:
        context.turn_to(runs=False)
        with context.steps.backstop(Phase.REFERENCE):
            context.processes.begin_reference()
        found = context.recalled = _begin(context)
    return found


@contextlib.contextmanager
def _warming_up(context: Context) -> Generator[None]:
    """Open the device and load the judge's own kernels while the reference draws and answers."""
    if not context.slot.on_gpu:
        yield
        return
    with context.steps.backstop(Phase.PREPARE):
        torch.cuda.synchronize()
        torch.cuda.set_per_process_memory_fraction(1.0)  # The evaluation's plan sets a limit later.
    if context.earlier is not None:
        yield
        return
    with ThreadPoolExecutor(1) as pool:
        warm_up = pool.submit(answers.warm_up, context.settings)
        yield
    warm_up.result()


def _begin(context: Context) -> tuple[Reference, Case]:
    """Load the problem, answer its first case within booked memory, and fork the candidate."""
    budget, processes, steps = context.budget, context.processes, context.steps
    alone = Grant.ALL_MEMORY in context.granted
    budget.book(plan.of_first_draw(**budget.whole, alone=alone))
    with steps.timed("reference"), steps.backstop(Phase.REFERENCE):
        assert processes.reference is not None
        # The driver opens the device for one process at a time, and the reference needs it first.
        processes.reference.proxy.await_opening()
        processes.begin_candidate()
        reference = processes.make_reference_ready(context.evidence, budget.plan.reference)
        proxy, cache = reference.proxy, reference.cache
        weights = proxy.taken().weights
        first = cache.first()
        with proxy.blaming("Model.setup"):
            context.evidence.reference_setup_ms = proxy.exchange.set_up(first.inputs)
        cache.warm_up_variants()
    context.evidence.inputs = reference.describe_inputs()
    budget.book(plan.of_first_call(cache.input_bytes, weights, **budget.whole, alone=alone))
    with context.untimed_if_large(reference, "reference"), steps.timed("reference"), steps.backstop(Phase.REFERENCE):
        proxy.allow(budget.plan.reference)
        if context.pass_ is not None:
            first = reference.differentiate(first, backward=context.pass_ is Pass.BOTH)
            context.evidence.gradients = reference.form.gradient_names
        reference.oracle.widen()
        peak = reference.answer_first(first)
    outputs = first.nbytes - cache.input_bytes
    budget.book(plan.settled(cache.input_bytes, outputs, weights, peak, **budget.whole))
    with steps.backstop(Phase.REFERENCE):
        proxy.allow(budget.plan.reference)
    reference.timed_bytes = max(budget.plan.reference, budget.plan.candidate)
    budget.record()
    return reference, first


def _answer(context: Context, reference: Reference, first: Case) -> tuple[list[Case], Case | None, list[Case]]:
    """Return the cases to check now, the case for after the timing, and the variants for the timed calls."""
    # If all cases would take too much memory together, each is drawn and answered when it is checked.
    settings, steps, cache = context.settings, context.steps, reference.cache
    last, variants = list[Case](), list[Case]()
    lock = context.untimed_if_large(reference, "reference") if cache.is_roomy else contextlib.nullcontext()
    with lock, steps.timed("reference"), steps.backstop(Phase.REFERENCE):
        cases = reference.more_cases(first)
        if cache.is_roomy:
            is_single = settings.timing.enabled and timing.turns_together(reference) == 1
            last = [cache.another()] if is_single else []
            # The first variant's float64 answers load kernels. Here that does not delay the timing of other slots.
            reference.answer(first, *cases[settings.checks - 1 :][:1])
        if settings.timing.enabled:
            variants = _timed_variants(reference, first, cases)
    with steps.untimed("reference"):
        with steps.backstop(Phase.REFERENCE):
            if (region := sensitivity.learn(reference, first)) is not None:
                cases.append(region)
            if context.slot.on_gpu and not cache.is_roomy:
                torch.cuda.empty_cache()  # Free the copy of an output before lasting tensors are allocated.
            every = (first, *cases, *last, *variants) if cache.is_roomy else (first,)
            answered = reference.answer(*every)
            # The comparison loads kernels and buffers at first use. Load them before a kernel is compared.
            compare.check_values(first.outputs, replace(first, check=None), settings)
            if reference.checker is not None:
                reference.checker.prove([case for case in answered if case.kind == GIVEN])
                accepts = tuple(reference.checker.accepted)
                context.evidence.checker = Checker(bound=reference.checker.bound, accepts=accepts)
            if context.slot.on_gpu and settings.timing.enabled:
                cache.stock(timing.usual_inputs(settings.timing, reference))
        # Test the device before the kernel uses it. This also loads the code that later tests need.
        if context.earlier is None:
            context.device.test()
    if not cache.is_roomy:
        return [first, *cases], None, variants
    checked = [case for case in answered if case not in last and case not in variants]
    return checked, last[0] if last else None, [case for case in variants if case in answered]


def _timed_variants(reference: Reference, first: Case, cases: Sequence[Case]) -> list[Case]:
    """Return a few hidden variants for the timed calls, chosen at random. They are made of other inputs if possible."""
    # It is not known yet whether larger inputs are in the problem's domain.
    cache, kinds = reference.cache, [case.kind for case in cases if case.kind not in (GIVEN, LARGER)]
    kinds = random.SystemRandom().sample(kinds, min(reference.bounds.timed, len(kinds)))
    if not cache.is_roomy:
        return [cache.new(kind, drawn=first.drawn, on_device=first.on_device) for kind in kinds]
    return cache.vary(cache.new(), kinds) if kinds else []
