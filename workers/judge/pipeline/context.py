"""Context of one evaluation: everything that its stages share except their results."""

from __future__ import annotations

import contextlib
import enum
from typing import Final

from kqueue.contract import Request
from kqueue.passes import Pass
from kqueue.shapes import Shape, problem_of
from workers.judge.backend import JudgeBackend
from workers.judge.forkserver.handle import ForkServer
from workers.judge.gpu import environment
from workers.judge.host.status_page import StatusPage
from workers.judge.pipeline import estimator, static
from workers.judge.pipeline.budget import Budget
from workers.judge.pipeline.cases import Case
from workers.judge.pipeline.clocks import Instruments
from workers.judge.pipeline.cpu import CpuTime
from workers.judge.pipeline.evidence import Comparisons, Observed
from workers.judge.pipeline.health import Device
from workers.judge.pipeline.processes import Processes
from workers.judge.pipeline.reference import Reference
from workers.judge.pipeline.steps import Steps
from workers.judge.slot_config import SlotConfig

#: Maximum number of input sets of further shapes that are checked, in addition to hidden variants.
_FURTHER_CHECKS: Final = 2


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
        earlier: the context of the shape or pass before, whose processes this one shares, or None.
        instruments: the means to time calls, once there are some.
        environment_hash: key of the environment that measurements depend on, once it is known.
        recalled: the reference of the shape and its first case, if they were made again after other shapes.
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
        shape: Shape | None = None,
        pass_: Pass | None = None,
        parts: int = 1,
        earlier: Context | None = None,
    ) -> None:
        """Prepare without starting a process. ``parts`` is the number of shapes that share the time for timed calls."""
        kernel, self.fence = static.without_fence(request.kernel)
        if self.fence is not None:
            request = request.model_copy(update={"kernel": kernel})
        self.problem_hash, self.shape, self.pass_, self.earlier = request.problem_hash, shape, pass_, earlier
        submitted = request
        if shape is not None:
            request = request.model_copy(update={"problem": problem_of(request.problem, shape)})
        self.evidence, self.compared, self.tests_log = Observed(), Comparisons(), ""
        timing = request.settings.timing
        if slot.interprets(request.backend) and timing.enabled and not timing.interpreter:
            settings = request.settings.model_copy(update={"timing": timing.off()})
            request = request.model_copy(update={"settings": settings})
            self.evidence.untimed = "Triton's interpreter runs on the CPU"
        settings = request.settings.model_copy(update={"timing": estimator.share(request.settings.timing, parts)})
        if earlier is not None:
            settings = settings.model_copy(update={"checks": min(settings.checks, _FURTHER_CHECKS)})
        request = request.model_copy(update={"settings": settings})
        self.request, self.settings, self.slot = request, request.settings, slot
        self.backend, self.forkserver = backend, forkserver
        self.cpu, self.granted = cpu, granted
        self.instruments: Instruments | None = None
        self.environment_hash = ""
        self.recalled: tuple[Reference, Case] | None = None
        if earlier is not None:
            self.steps, self.watch, self.processes = earlier.steps, earlier.watch, earlier.processes
            self.budget, self.device, self.instruments = earlier.budget, earlier.device, earlier.instruments
            self.environment_hash = earlier.environment_hash
            self.turn_to(runs=True)
            return
        self.steps, self.watch = Steps(status_page, slot, settings.total_s), environment.Watch(slot)
        self.processes = Processes(submitted, slot, forkserver, cpu, pass_)
        self.processes.turn_to(request, pass_)
        self.budget = Budget(request, slot, self.processes, self.steps, self.evidence)
        self.device = Device(slot, backend, self.steps, self.evidence, timed=settings.timing.enabled)

    def turn_to(self, *, runs: bool) -> None:
        """Use the shared parts for this shape and pass. ``runs`` is True if the candidate still runs."""
        self.processes.turn_to(self.request, self.pass_, is_further=self.earlier is not None)
        self.budget.turn_to(self.evidence, runs=runs)
        self.device.evidence = self.evidence

    def untimed_if_large(self, reference: Reference, what: str) -> contextlib.AbstractContextManager[None]:
        """Return a lock that excludes timing if the inputs are large enough to disturb it."""
        return self.steps.untimed(what) if self.slot.on_gpu and reference.cache.is_large else contextlib.nullcontext()
