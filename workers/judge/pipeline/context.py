"""Context of one evaluation: everything that its stages share except their results."""

from __future__ import annotations

import contextlib
import enum
from dataclasses import dataclass

from kqueue.contract import Request, Settings
from workers.judge.backend import JudgeBackend
from workers.judge.forkserver.handle import ForkServer
from workers.judge.gpu import environment
from workers.judge.host.status_page import StatusPage
from workers.judge.pipeline.budget import Budget
from workers.judge.pipeline.cpu import CpuTime
from workers.judge.pipeline.device import Device
from workers.judge.pipeline.evidence import EvidenceBuilder
from workers.judge.pipeline.processes import Processes
from workers.judge.pipeline.reference import Reference
from workers.judge.pipeline.steps import Steps
from workers.judge.slot_config import SlotConfig


class Grant(enum.Enum):
    """A GPU resource that an evaluation gets only after it failed without it, because all other slots must wait."""

    #: All memory for the reference's first call.
    ALL_MEMORY = enum.auto()
    #: The exclusive device for checked calls on large inputs.
    EXCLUSIVE = enum.auto()


@dataclass(frozen=True, slots=True)
class Context:
    """Parts of one evaluation.

    Attributes:
        backend: storage of environments, baselines and suspect GPU reports.
        forkserver: source of the sealed processes.
        cpu: CPU time of the evaluation, restarts included.
        granted: GPU resources that the evaluation gets because it failed without them.
        watch: the GPU's clocks.
        steps, evidence, processes, budget, device: state that the stages change.
    """

    request: Request
    slot: SlotConfig
    backend: JudgeBackend
    forkserver: ForkServer
    cpu: CpuTime
    granted: frozenset[Grant]
    watch: environment.Watch
    steps: Steps
    evidence: EvidenceBuilder
    processes: Processes
    budget: Budget
    device: Device

    @property
    def settings(self) -> Settings:
        """Settings of the request."""
        return self.request.settings

    def untimed_if_large(self, reference: Reference, what: str) -> contextlib.AbstractContextManager[None]:
        """Return a lock that excludes timing if the inputs are large enough to disturb it."""
        large = self.slot.on_gpu and reference.cache.is_large
        return self.steps.untimed(what) if large else contextlib.nullcontext()


def begin(
    request: Request,
    slot: SlotConfig,
    backend: JudgeBackend,
    status_page: StatusPage,
    forkserver: ForkServer,
    cpu: CpuTime,
    granted: frozenset[Grant],
) -> Context:
    """Return the context of an evaluation, or of its restart with ``granted`` resources."""
    steps, evidence = Steps(status_page, slot, request.settings.total_s), EvidenceBuilder()
    processes = Processes(request, slot, forkserver, cpu)
    return Context(
        request,
        slot,
        backend,
        forkserver,
        cpu,
        granted,
        environment.Watch(slot),
        steps,
        evidence,
        processes,
        Budget(request, slot, processes, steps, evidence),
        Device(slot, backend, steps, evidence, timed=request.settings.timing.enabled),
    )
