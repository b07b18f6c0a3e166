"""Stage ``conclude``: the timed calls are verified, the candidate ends, and its times are compared with the bounds.

Of several shapes that share the candidate, each is verified before the next begins. The rest waits for the end of the
candidate, which could disturb it.
"""

from __future__ import annotations

import statistics

import torch

from kqueue.categories import Category
from kqueue.contract import Outcome, Phase, Policy
from kqueue.evidence import Finding, Measurement, Severity, TimedVariants
from workers.judge.ending import EvaluationEnded
from workers.judge.forkserver.control import End
from workers.judge.pipeline import estimator, parameters, provenance, sensitivity, speed_of_light
from workers.judge.pipeline.cases import Form
from workers.judge.pipeline.context import Context
from workers.judge.pipeline.exchange import Candidate
from workers.judge.pipeline.stages.measure import Measured, Times
from workers.judge.pipeline.stages.refer import Referenced, recall


def begin_stop(context: Context, candidate: Candidate) -> None:
    """Begin to end a candidate that has made all calls of all shapes."""
    # The driver takes a while to free the candidate's memory. Meanwhile the reference verifies, and no other slot
    # waits for the device. The driver opens the device for one process at a time, so the next candidate starts now.
    candidate.process.begin_stop()
    if not context.slot.on_gpu:
        candidate.unbind()  # The reference needs the memory of large inputs.
    context.processes.begin_next()


def verify(context: Context, measured: Measured) -> None:
    """Verify the timed calls of a shape, while the reference has it."""
    if measured.times is None:
        return
    steps, kept = context.steps, measured.times.kept
    with steps.untimed("verify"), steps.backstop(Phase.REFERENCE):
        verified = len(kept)
        for compared in kept.verify():
            context.compared.add(*compared)
        context.evidence.verified_calls = verified
    context.device.after_timing()


def conclude(context: Context, referenced: Referenced, measured: Measured) -> Outcome:
    """Enforce policies and bounds when the candidate is gone. Return a pass without evidence."""
    candidate, times = measured.candidate, measured.times
    if times is not None and times.stopwatch.has_other_layouts:
        with context.steps.alone("layouts"), context.steps.backstop(Phase.TIME):
            times.stopwatch.compare_layouts()
    if hidden := measured.hidden_weights:
        names = parameters.listed(hidden)
        meaning = f"constant initial values hide what {names} do, so a kernel can leave it out"
        _report(context, "weights_hidden", names, meaning, Policy.FLAG)
    enforce_policies(context, referenced.reference.form)
    if candidate.activities is not None:
        origin = provenance.assess(candidate.activities, context.request.kernel, context.request.backend)
        context.evidence.provenance = origin
        provenance.enforce(origin, context.settings.policies.decoys)
    runtime = baseline = None
    if times is not None:
        runtime, baseline = _compare_times(context, referenced, times)
        _enforce_bound(context, referenced, times, runtime)
    hidden = measured.checks - context.settings.checks
    context.evidence.unvaried = None if hidden else referenced.reference.unvaried
    message = f"right on {measured.checks} input sets"
    message += f", {hidden} of them hidden variants, random each time" if hidden else ""
    return passed(context, message, runtime, baseline)


def passed(context: Context, message: str, runtime: Measurement | None, baseline: Measurement | None) -> Outcome:
    """Return a pass without evidence, unless its speedup is less certain than the settings require."""
    message += f"; not timed: {context.evidence.untimed}" if context.evidence.untimed is not None else ""
    outcome = Outcome(category=Category.PASSED, message=message, runtime=runtime, baseline=baseline)
    _enforce_error(outcome, context.settings.timing.max_error)
    return outcome


def enforce_policies(context: Context, form: Form) -> None:
    """Report what the comparison found about buffers and precision."""
    _report_buffers(context, form)
    policy, errors = context.settings.policies.downgrades, context.compared.errors
    if policy is not Policy.ALLOW and errors is not None and errors.precision_downgrade:
        _report(context, "precision_downgrade", "outputs", "lower precision than the reference's", policy)


def stop(context: Context, candidate: Candidate) -> None:
    """End a candidate that has finished its calls, and reject leftovers."""
    context.steps.enter(Phase.CLEANUP)
    # A candidate that died while it was profiled has finished all calls that count.
    profiled_to_death = candidate.process.ended is not None
    report = candidate.process.stop()
    candidate.unbind()
    candidate.process.imports.close()
    if report.reason is not End.STOPPED and not profiled_to_death:
        raise candidate.process.died()
    if report.leftovers:
        raise EvaluationEnded(
            Category.SANDBOX_VIOLATION,
            f"processes that the kernel left behind: {report.leftovers}",
            Phase.CLEANUP,
            leftovers=report.leftovers,
        )


def _report_buffers(context: Context, form: Form) -> None:
    """Report the changes of the reference's model that the kernel does not make, and those that are not compared."""
    policy = context.settings.policies.buffers
    unkept = [form.buffers[number - form.effects] for number in form.unkept]
    sampled = form.resets[len(form.buffers) :]
    for rule, names, meaning, refusal in (
        ("buffers_not_kept", unkept, "the kernel lacks them or leaves them unchanged", policy),
        ("buffers_not_chosen", sampled, "only a random choice of so many is compared", Policy.FLAG),
        ("buffers_not_compared", form.unwatched, "their size is beyond the limit of the comparison", Policy.FLAG),
    ):
        if names and policy is not Policy.ALLOW:
            meaning = f"the reference changes these buffers or parameters of its model, and {meaning}"
            _report(context, rule, parameters.listed(sorted(names)), meaning, refusal)


def _report(context: Context, rule: str, subject: str, meaning: str, policy: Policy) -> None:
    finding = Finding(rule=rule, severity=Severity.NOTE, line=None, evidence=subject, by="kqueue", meaning=meaning)
    context.evidence.findings = (*(context.evidence.findings or ()), finding)
    if policy is Policy.REJECT:
        raise EvaluationEnded(Category.REJECTED_BY_POLICY, f"{subject}: {meaning}", Phase.CHECK, findings=[finding])


def _compare_times(context: Context, referenced: Referenced, times: Times) -> tuple[Measurement, Measurement]:
    """Return the times of the kernel and the reference."""
    baseline, own, settings = referenced.baseline, times.series, context.settings.timing
    assert baseline is not None
    if times.beside is None:
        first = measured = baseline.settle(own, None, fine=False)
    else:
        first, measured = baseline.summarise(times.beside), None
    on_gpu = context.slot.on_gpu
    overhead = estimator.overhead_of(own, first, times.beside, on_gpu=on_gpu)
    runtime = estimator.summarise(own, overhead, settings, times.beside, on_gpu=on_gpu, fine=first.is_fine)
    measured = measured or baseline.settle(own, times.beside, fine=runtime.is_fine)
    if runtime.is_fine and times.beside is not None:
        outside = estimator.summarise(own, overhead, settings, times.beside, on_gpu=on_gpu, fine=False).median_ms
        theirs = baseline.summarise(times.beside, fine=False).median_ms
        context.evidence.judge_speedup = theirs / outside if outside > 0 else None
    if own.variants:
        slower = len(own.variants) > 2 and min(own.variants) > statistics.quantiles(own.calls, n=10)[-1]
        ratio = own.variant_ratio(overhead)
        context.evidence.timed_variants = TimedVariants(count=len(own.variants), ratio=ratio, slower=slower)
    if settings.compiled_baseline:
        context.evidence.compiled_baseline = baseline.compiled_baseline(own)
    return runtime, measured


def _enforce_error(outcome: Outcome, most: float) -> None:
    """Reject a speedup that is less certain than the settings require."""
    runtime = outcome.runtime
    if not most or runtime is None or outcome.speedup is None or outcome.speedup_interval is None:
        return
    error = outcome.speedup_interval[1] / outcome.speedup - 1
    if error > most:
        message = (
            f"the speedup {outcome.speedup:.3g} has the relative error {error:.3g}, above timing.max_error = {most:g}"
        )
        raise EvaluationEnded(Category.TIMING_UNSTABLE, message, Phase.TIME, clocks=runtime.clocks)


def _enforce_bound(context: Context, referenced: Referenced, times: Times, runtime: Measurement) -> None:
    """Reject a time that is too short to move the required bytes through memory."""
    bound, steps = times.bound, context.steps
    if bound is None:
        return
    speed_of_light.enforce(bound, runtime)
    cached = speed_of_light.cacheable(runtime, torch.cuda.get_device_properties(0).L2_cache_size)
    if speed_of_light.is_beyond(bound, runtime, cached):
        reference, first = recall(context, referenced.reference, referenced.first)
        with steps.untimed("influence"), steps.backstop(Phase.REFERENCE):
            needed = sensitivity.needed_bytes(reference, first, context.budget.after_kernel())
        bound = context.evidence.floor = speed_of_light.needing(bound, needed, cached)
        speed_of_light.enforce(bound, runtime)
