"""Stages ``build`` and ``load``: the kernel's source is compiled, imported and constructed."""

from __future__ import annotations

from kqueue import backends
from kqueue.contract import Phase
from workers.judge.pipeline.context import Context
from workers.judge.pipeline.exchange import Candidate
from workers.judge.pipeline.stages.refer import Referenced


def build(context: Context) -> Candidate:
    """Compile the sources that the candidate will import, unless it has imported them. Return the candidate."""
    processes = context.processes
    candidate = processes.begin_candidate()
    if context.earlier is not None:
        context.evidence.build = context.earlier.evidence.build
    elif processes.builder is not None:
        with context.steps.timed("build"), context.steps.backstop(Phase.COMPILE):
            compilation = processes.build(context.evidence)
        if compilation.skipped is None:  # Otherwise the candidate can need the time to compile everything itself.
            candidate.process.charge_compilers(compilation.seconds)
    return candidate


def load(context: Context, referenced: Referenced, candidate: Candidate) -> None:
    """Import the source and construct the model."""
    reference = referenced.reference
    with context.steps.timed("construct"), context.steps.backstop(Phase.CONSTRUCT):
        triton = context.slot.on_gpu and backends.find(context.request.backend).triton
        candidate.form = reference.form
        reference.cache.present(referenced.first)
        candidate.construct(reference.proxy.init_inputs, referenced.first, context.budget.plan, warm_up=triton)
        context.evidence.setup_ms = candidate.setup_ms
