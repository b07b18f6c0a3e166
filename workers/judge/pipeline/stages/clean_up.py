"""The end of every evaluation: its processes end, the blame is settled, and the outcome gets its log and evidence."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final

import torch

from kqueue.backends import PYTEST
from kqueue.categories import Blame, Category
from kqueue.contract import Outcome, Phase
from kqueue.evidence import Evidence, Facts, Isolation, Profile, Sanitized
from workers.judge.channel.gpu_memory import CudaCallError
from workers.judge.ending import EvaluationEnded
from workers.judge.forkserver.control import Counted, Report
from workers.judge.forkserver.handle import ForkServerError
from workers.judge.forkserver.process import SealedProcess
from workers.judge.pipeline import blame, examine
from workers.judge.pipeline.context import Context

#: Upper estimate in bytes of the GPU memory for a candidate's CUDA context and loaded kernels.
_SLACK_BYTES: Final = 2 << 30
#: Control characters, which a log must not contain because a terminal or a page would obey them.
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
#: Minimum free disk space in bytes, not counting the sealed processes' own files. Below it, the host is blamed.
_ROOM_BYTES: Final = 64 << 20

#: Reports of the processes that were ended.
Reports = dict[SealedProcess, Report]


def blame_for(context: Context, error: Exception) -> Outcome:
    """Return the outcome after a failure of the judge's own work on the GPU."""
    # The candidate has its own CUDA context, so an error in the judge's context comes from the device.
    with context.steps.backstop(Phase.CLEANUP):
        hog = _memory_hog(context)
    return hog or Outcome(
        category=Category.GPU_UNHEALTHY,
        message=f"the judge's own work on the GPU failed: {type(error).__name__}: {error}",
        facts=Facts(cuda_code=getattr(error, "error_code", None)),
    )


def _memory_hog(context: Context) -> Outcome | None:
    """Return the outcome of a kernel that holds more GPU memory than its share, or None if it does not."""
    candidate = context.processes.candidate
    if candidate is None:
        return None
    try:
        context.processes.stop_others()
        before, _ = torch.cuda.mem_get_info()
        candidate.process.stop()
        held = torch.cuda.mem_get_info()[0] - before
    except (torch.AcceleratorError, CudaCallError, ForkServerError):
        return None
    allowed = context.budget.plan.candidate
    if held <= allowed + _SLACK_BYTES:
        return None
    return Outcome(
        category=Category.GPU_OUT_OF_MEMORY,
        message=f"the kernel held {held} bytes of the GPU's memory, and its share is {allowed} bytes",
        phase=Phase.CHECK,
        facts=Facts(held_bytes=held, allowed_bytes=allowed),
    )


def settle(context: Context, outcome: Outcome) -> tuple[Outcome, Reports]:
    """End the running processes. Return the outcome with the right blame, and the processes' reports."""
    context.steps.enter(Phase.CLEANUP)
    reports: Reports = {}
    processes = context.processes
    with context.steps.backstop(Phase.CLEANUP):
        if why := processes.end(outcome, reports):
            context.evidence.cleanup = why
        for process in reports:
            process.imports.close()  # Otherwise its memory would outlive it and belong to no process.
        if processes.reference is not None:
            processes.reference.proxy.free_arena()
    outcome = blame.settle(outcome, reports.values(), alone=context.slot.alone)
    outcome = _check_memory(context, _check_disk(context, outcome, reports))
    something_ran = processes.candidate is not None or context.evidence.tests is not None
    return context.device.check(outcome) if something_ran else outcome, reports


def _check_disk(context: Context, outcome: Outcome, reports: Reports) -> Outcome:
    """Blame the fleet if the host's disk is full for other reasons than the kernel's own files."""
    # Sealed processes with their own file systems do not need the host's disk.
    if outcome.blame not in (Blame.CANDIDATE, Blame.PROBLEM) or context.forkserver.isolation["mounts"] is True:
        return outcome
    scratch = context.slot.scratch
    disk = os.statvfs(scratch)
    room = disk.f_bavail * disk.f_frsize + sum(report.scratch_bytes for report in reports.values())
    if room >= _ROOM_BYTES:
        return outcome
    return Outcome(
        category=Category.JUDGE_ERROR,
        message=f"the disk of {scratch} is full",
        phase=outcome.phase,
        facts=Facts(room_bytes=room, instead_of=outcome.category),
    )


def _check_memory(context: Context, outcome: Outcome) -> Outcome:
    """Blame the fleet if a kernel ran out of GPU memory because it did not get its share."""
    plan, candidate = context.budget.plan, context.processes.candidate
    if outcome.category is not Category.GPU_OUT_OF_MEMORY or not context.budget.is_booked or candidate is None:
        return outcome
    try:
        # All processes of the evaluation are gone. If its booked memory is not free, other processes hold it.
        candidate.unbind()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
    except (torch.AcceleratorError, CudaCallError):
        return outcome
    if free >= plan.total:
        facts = outcome.facts.model_copy(update={"allowed_bytes": plan.candidate})
        return outcome.model_copy(update={"facts": facts})
    return Outcome(
        category=Category.JUDGE_ERROR,
        message=f"other processes hold some of the kernel's {plan.candidate} bytes of GPU memory",
        phase=outcome.phase,
        facts=Facts(instead_of=outcome.category, allowed_bytes=plan.candidate),
    )


def examine_kernel(context: Context, outcome: Outcome) -> None:
    """Run the kernel again under the requested tools, without effect on the verdict."""
    asked, evidence, candidate = context.settings.examine, context.evidence, context.processes.candidate
    if not asked or context.request.backend == PYTEST or not examine.is_worthwhile(outcome):
        return
    if not context.slot.on_gpu:
        why = "it needs a GPU"
        evidence.sanitized = tuple(Sanitized(tool=tool, error=why, seconds=0.0) for tool in asked.sanitize) or None
        evidence.profile = Profile(by="ncu", error=why, seconds=0.0) if asked.profile else None
        return
    examiner = context.processes.examiner(context.request, context.steps)
    try:
        if asked.sanitize:
            evidence.sanitized = tuple(examiner.sanitize(tool) for tool in asked.sanitize)
        if asked.profile:
            evidence.profile = examiner.profile(candidate.activities if candidate is not None else None)
        context.device.test()
    except (EvaluationEnded, torch.AcceleratorError, CudaCallError) as error:
        context.device.doubt(f"after a kernel was examined: {error}")


def complete(context: Context, outcome: Outcome, reports: Mapping[SealedProcess, Report | Counted]) -> Outcome:
    """Return the outcome with the log and the evidence. A process can have figures from before its report."""
    evidence, steps, processes = context.evidence, context.steps, context.processes
    evidence.durations_s = {name: round(value, 6) for name, value in steps.durations.items()}
    evidence.begun_s = {name: round(value, 6) for name, value in steps.begun.items()}
    evidence.cpu_s = context.cpu.seconds()
    measures = context.forkserver.isolation
    evidence.isolation = Isolation.model_validate(measures) if measures else None
    evidence.slots_on_device = context.slot.siblings
    evidence.waited_for = tuple(steps.waited_for) or None
    log = ""
    candidate, reference, builder = processes.candidate, processes.reference, processes.builder
    if candidate is not None and (report := reports.get(candidate.process)) is not None:
        log = (builder.log if builder is not None else "") + report.log
        evidence.peak_bytes, evidence.output_bytes = report.peak_bytes, report.output_bytes
    if outcome.blame is Blame.PROBLEM and reference is not None and reference.process in reports:
        log = reports[reference.process].log
    for report in reports.values() if evidence.tests is not None else ():
        log = "\n".join(filter(None, (context.tests_log, report.log)))
        evidence.peak_bytes, evidence.output_bytes = report.peak_bytes, report.output_bytes
    evidence.comparison = context.compared.errors
    evidence.profiles = context.compared.results(context.settings.profiles)
    found = Evidence.model_validate({name: value for name, value in evidence if value is not None})
    message = outcome.message + found.doubts * outcome.passed
    return outcome.model_copy(update={"log": _CONTROL.sub("\ufffd", log), "evidence": found, "message": message})
