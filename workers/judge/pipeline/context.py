"""Context of one evaluation: everything that its stages share except their results."""

from __future__ import annotations

import contextlib
import enum

from kqueue.contract import Request
from kqueue.passes import Pass
from kqueue.shapes import Shape, problem_of
from workers.judge.backend import JudgeBackend
from workers.judge.forkserver.handle import ForkServer
from workers.judge.gpu import environment
from workers.judge.host.status_page import StatusPage
from workers.judge.pipeline import static
from workers.judge.pipeline.budget import Budget
from workers.judge.pipeline.cpu import CpuTime
from workers.judge.pipeline.evidence import Comparisons, Observed
from workers.judge.pipeline.health import Device
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


class Context:
    """Parts of one evaluation, or of its restart.

    Attributes:
        backend: storage of environments, baselines and suspect GPU reports.
        cpu: CPU time of the evaluation, restarts included.
        granted: GPU resources that the evaluation gets because it failed without them.
        problem_hash: hash of the submitted problem.
        shape: the shape of the problem to judge, or None. ``request`` then has the problem with this shape only.
        pass_: the pass with gradients to judge, or None for a plain forward.
        watch: the GPU's clocks.
        fence: the finding of Markdown around the kernel's source, which was taken out of it, or None.
        request, settings: the request and its settings, without timing where times would say nothing.
        compared: the errors of compared calls.
        tests_log: end of the captured output of a repository's tests.
        steps, evidence, processes, budget, device: state that the stages change.
    """

    def __init__(
        self,
        request: Request,
        slot: SlotConfig,
        backend: JudgeBackend,
        status_page: StatusPage,
        forkserver: ForkServer,
        cpu: CpuTime,
        granted: frozenset[Grant],
        shape: Shape | None,
        pass_: Pass | None,
    ) -> None:
        """Prepare without starting a process."""
        kernel, self.fence = static.without_fence(request.kernel)
        if self.fence is not None:
            request = request.model_copy(update={"kernel": kernel})
        self.problem_hash, self.shape, self.pass_ = request.problem_hash, shape, pass_
        if shape is not None:
            request = request.model_copy(update={"problem": problem_of(request.problem, shape)})
        self.steps = Steps(status_page, slot, request.settings.total_s)
        self.evidence, self.compared, self.tests_log = Observed(), Comparisons(), ""
        timing = request.settings.timing
        if slot.interprets(request.backend) and timing.enabled and not timing.interpreter:
            settings = request.settings.model_copy(update={"timing": timing.off()})
            request = request.model_copy(update={"settings": settings})
            self.evidence.untimed = "Triton's interpreter runs on the CPU"
        self.request, self.settings, self.slot = request, request.settings, slot
        self.backend, self.forkserver = backend, forkserver
        self.cpu, self.granted = cpu, granted
        self.watch = environment.Watch(slot)
        self.processes = Processes(request, slot, forkserver, cpu, pass_)
        self.budget = Budget(request, slot, self.processes, self.steps, self.evidence)
        self.device = Device(slot, backend, self.steps, self.evidence, timed=request.settings.timing.enabled)

    def untimed_if_large(self, reference: Reference, what: str) -> contextlib.AbstractContextManager[None]:
        """Return a lock that excludes timing if the inputs are large enough to disturb it."""
        large = self.slot.on_gpu and reference.cache.is_large
        return self.steps.untimed(what) if large else contextlib.nullcontext()
