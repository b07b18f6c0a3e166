"""Driver of one evaluation, from a request to an outcome.

Timing and the checks of small inputs hold the device exclusively by the slot's lock. The reference's answers, its
verifications and the checks of large inputs overlap with the same work of other slots, but with no timing. Everything
else overlaps with all work of other slots.
"""

from __future__ import annotations

import functools
import time
from typing import Final

import torch

from kqueue.backends import PYTEST
from kqueue.categories import Blame, Category
from kqueue.contract import Outcome, Phase, Policy, Request
from kqueue.passes import Pass
from kqueue.shapes import Shape
from workers.judge.backend import JudgeBackend
from workers.judge.channel import flags
from workers.judge.channel.gpu_memory import CudaCallError
from workers.judge.channel.protocol import Tag
from workers.judge.ending import EvaluationEnded
from workers.judge.forkserver.handle import ForkServer
from workers.judge.host.status_page import StatusPage
from workers.judge.pipeline import group, passes, static
from workers.judge.pipeline.blame import ABOUT_VALUES, OutOfAllowance
from workers.judge.pipeline.context import Context, Grant
from workers.judge.pipeline.cpu import CpuTime
from workers.judge.pipeline.pytest_run import run_tests
from workers.judge.pipeline.shapes import Judged, combine
from workers.judge.pipeline.sizes import judge_further
from workers.judge.pipeline.stages import clean_up
from workers.judge.pipeline.stages.conclude import conclude
from workers.judge.pipeline.stages.load import build, load
from workers.judge.pipeline.stages.measure import measure
from workers.judge.pipeline.stages.prepare import prepare
from workers.judge.pipeline.stages.refer import refer
from workers.judge.slot_config import SlotConfig

#: Categories of checks that took too long: the kernel's, or the reference's, which draws and answers between them.
_OVERDUE: Final = frozenset({Category.TIMEOUT, Category.REFERENCE_TIMEOUT})


def evaluate(
    request: Request, slot: SlotConfig, backend: JudgeBackend, status_page: StatusPage, forkserver: ForkServer
) -> Outcome:
    """Judge one request in this process: the shapes of its problem one after the other, until the kernel fails.

    Args:
        backend: storage of environments, baselines and suspect GPU reports.
        status_page: page for the current phase, by which the requester explains this process's death.

    Returns:
        The outcome, blamed on the candidate, the problem or the fleet.

    Raises:
        Exception: the judge itself failed, which shows nothing about the kernel.
    """
    around, cpu = (slot, backend, status_page, forkserver), CpuTime()
    judge = functools.partial(_judge, request, *around, cpu)
    listed, backward = static.shapes_of(request), static.asks_backward(request)
    if not listed and not backward:
        if request.settings.policies.shapes is Policy.ALLOW:
            return judge()
        with forkserver.one_build():
            if not (outcome := judge()).passed:
                return outcome
            return judge_further(outcome, request, lambda other: _judge(other, *around, cpu, is_first=False))
    results: list[Judged] = []
    with forkserver.one_build():
        for shape in listed or (None,):
            begun = time.monotonic()
            outcome = judge(shape, Pass.BOTH if backward else None, is_first=not results)
            if backward and outcome.runtime is not None:
                outcome = passes.combine(outcome, judge(shape, Pass.FORWARD, is_first=False))
            if shape is None:
                return outcome
            results.append(Judged(shape, outcome, time.monotonic() - begun))
            if not outcome.passed:
                break
    return combine(listed, results)


def _judge(
    request: Request,
    slot: SlotConfig,
    backend: JudgeBackend,
    status_page: StatusPage,
    forkserver: ForkServer,
    cpu: CpuTime,
    shape: Shape | None = None,
    pass_: Pass | None = None,
    *,
    is_first: bool = True,
) -> Outcome:
    """Judge a pass of a request, or of one shape of it. Start again with more resources if it failed for lack of them.

    ``cpu`` counts the CPU time of all processes. ``is_first`` is False if the kernel has passed another shape or pass.
    """
    granted = frozenset[Grant]()
    while True:
        context = Context(request, slot, backend, status_page, forkserver, cpu, granted, shape, pass_)
        outcome, ran_out = _run(context)
        outcome, reports = clean_up.settle(context, outcome)
        missing = _missing_grant(context, outcome, ran_out=ran_out)
        is_shown = shape is None or not shape.held_out
        if missing is None and is_shown and (is_first or not outcome.passed):
            clean_up.examine_kernel(context, outcome)
        if outcome.blame in (Blame.NONE, Blame.CANDIDATE):
            context.processes.begin_next()
        context.budget.release()
        if missing is None:
            return clean_up.complete(context, outcome, reports)
        granted |= {missing}


def _run(context: Context) -> tuple[Outcome, bool]:
    """Run the stages. Return their outcome, and whether the reference ran out of its memory."""
    try:
        return _run_stages(context), False
    except EvaluationEnded as ended:
        context.compared.add(ended.outcome.facts.errors, ended.faults)
        return _doubted(context, ended), isinstance(ended, OutOfAllowance)
    except (torch.OutOfMemoryError, torch.AcceleratorError, CudaCallError) as error:
        return clean_up.blame_for(context, error), False


def _doubted(context: Context, ended: EvaluationEnded) -> Outcome:
    """Return the outcome, or ``needs_gpu`` if the lack of a GPU can have caused a kernel's failure.

    Both causes are claims of the kernel. On a CPU it can so escape the blame for its failure, but it cannot pass.
    """
    outcome, candidate = ended.outcome, context.processes.candidate
    if context.slot.on_gpu or outcome.blame is not Blame.CANDIDATE or candidate is None:
        return outcome
    if ended.reply is not None and ended.reply.tag is Tag.NEEDS_GPU:
        why = ""
    elif outcome.category in ABOUT_VALUES | {Category.NONDETERMINISTIC} and candidate.process.flags[flags.NARROW] != 0:
        why = ". It computes in bfloat16 or float8, where a GPU can round otherwise than Triton's interpreter"
    else:
        return outcome
    facts = outcome.facts.model_copy(update={"instead_of": outcome.category})
    message = f"{outcome.message}{why}: judge it on a GPU"
    return outcome.model_copy(update={"category": Category.NEEDS_GPU, "message": message, "facts": facts})


def _run_stages(context: Context) -> Outcome:
    prepared = prepare(context)
    with context.watch:
        if context.request.backend == PYTEST:
            return run_tests(context)
        if world := static.world(context.request.problem):
            return group.judge(context, world)
        referenced = refer(context, prepared)
        built = build(context)
        loaded = load(context, referenced, built)
        measured = measure(context, referenced, loaded)
        return conclude(context, referenced, measured)


def _missing_grant(context: Context, outcome: Outcome, *, ran_out: bool) -> Grant | None:
    """Return the resource whose lack can have caused the outcome, or None if the evaluation already had it."""
    shared = "untimed_check" in context.steps.begun
    if ran_out:
        grant = Grant.ALL_MEMORY
    elif outcome.category in _OVERDUE and outcome.phase is not Phase.TIME and shared:
        grant = Grant.EXCLUSIVE  # Other slots' work took some of its or the reference's time.
    else:
        return None
    return None if grant in context.granted else grant
