"""One evaluation, from a request to an outcome.

Static checks come first and need no device. Then the reference and the judge open the device, followed by the
candidate. The reference imports the problem, draws inputs and answers them. Only then does any of the kernel's code
run (import, construction, compilation, checks and timing), so that it cannot disturb the reference. Timing and the
checks of small inputs hold the device exclusively by the slot's lock. The reference's answers, its verifications and
the checks of large inputs overlap with the same work of other slots, but with no timing. Everything else overlaps with
all work of other slots.
"""

from __future__ import annotations

import contextlib
import enum
import os
import re
import time
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from itertools import chain
from typing import Any, Final

import torch

from kqueue.categories import Blame, Category
from kqueue.contract import Backend, Outcome, Phase, Policy, Request
from kqueue.evidence import ErrorFigures, Facts, Measurement
from kqueue.limits import GPU_WAIT_S
from workers.judge.backend import JudgeBackend
from workers.judge.channel.activities import Activity, NotRecorded
from workers.judge.channel.gpu_memory import CudaCallError
from workers.judge.ending import EvaluationEnded
from workers.judge.forkserver.control import End, Report
from workers.judge.forkserver.handle import ForkServer, ForkServerError
from workers.judge.forkserver.process import SealedProcess
from workers.judge.gpu import booking, environment
from workers.judge.host import linux
from workers.judge.host.status_page import StatusPage
from workers.judge.pipeline import (
    answers,
    clocks,
    compare,
    examine,
    health,
    killed,
    plan,
    provenance,
    pytest_run,
    sensitivity,
    speed_of_light,
    static,
    timing,
    tools,
)
from workers.judge.pipeline import (
    baseline as baselines,
)
from workers.judge.pipeline.blame import OutOfAllowance
from workers.judge.pipeline.cases import GIVEN, Case
from workers.judge.pipeline.cpu import CpuTime
from workers.judge.pipeline.exchange import Candidate, Exchange
from workers.judge.pipeline.processes import Processes
from workers.judge.pipeline.reference import Reference
from workers.judge.pipeline.steps import Steps
from workers.judge.slot_config import SlotConfig

#: Number of a candidate's launch-overhead measurements as a share of its calls.
_OVERHEAD_SHARE: Final = 0.2
#: Number of timed calls that are verified: as many as the reference answers in this time in seconds, within bounds.
_MOST_PROOFS: Final = 16
_SLOW_PROOFS: Final = 8
_FEWEST_PROOFS: Final = 2
_PROOFS_S: Final = 0.05
#: Upper estimate in bytes of the GPU memory for a candidate's CUDA context and loaded kernels.
_SLACK_BYTES: Final = 2 << 30
#: Control characters, which a log must not contain because a terminal or a page would obey them.
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
#: Minimum size in bytes of inputs and outputs for the evaluation's real memory use to be recorded.
_MUCH_BYTES: Final = 256 << 20
#: Categories that another run on the same input can overturn.
_ABOUT_VALUES: Final = frozenset({Category.WRONG_VALUES, Category.NOT_FINITE})
#: Categories of checks that took too long: the kernel's, or the reference's, which draws and answers between them.
_OVERDUE: Final = frozenset({Category.TIMEOUT, Category.REFERENCE_TIMEOUT})
#: Minimum free disk space in bytes, not counting the sealed processes' own files. Below it, the host is blamed.
_ROOM_BYTES: Final = 64 << 20


class _Grant(enum.Enum):
    """A GPU resource that an evaluation gets only after it failed without it, because all other slots must wait."""

    #: All memory for the reference's first call.
    ALL_MEMORY = enum.auto()
    #: The exclusive device for checked calls on large inputs.
    EXCLUSIVE = enum.auto()


def evaluate(
    request: Request, slot: SlotConfig, backend: JudgeBackend, status_page: StatusPage, forkserver: ForkServer
) -> Outcome:
    """Judge one request in this process.

    Args:
        backend: storage of environments, baselines and suspect GPU reports.
        status_page: page for the current phase, by which the judge supervisor explains this process's death.

    Returns:
        The outcome, blamed on the candidate, the problem or the fleet.

    Raises:
        Exception: the judge itself failed, which shows nothing about the kernel.
    """
    cpu = CpuTime()
    granted: set[_Grant] = set()
    while True:
        try:
            return _Evaluation(request, slot, backend, status_page, forkserver, cpu, frozenset(granted)).run()
        except _NeedsGrant as needs:
            granted.add(needs.grant)


class _NeedsGrant(Exception):
    """An evaluation failed for lack of a GPU resource, and must be repeated with it."""

    def __init__(self, grant: _Grant) -> None:
        super().__init__(grant)
        self.grant = grant


class _Evaluation:
    def __init__(
        self,
        request: Request,
        slot: SlotConfig,
        backend: JudgeBackend,
        status_page: StatusPage,
        forkserver: ForkServer,
        cpu: CpuTime,
        granted: frozenset[_Grant],
    ) -> None:
        """Prepare an evaluation. It gets the ``granted`` GPU resources because it failed without them."""
        self._request = request
        self._settings = request.settings
        self._deadlines = request.settings.deadlines
        self._slot = slot
        self._backend = backend
        self._status_page = status_page
        self._forkserver = forkserver
        self._processes = Processes(request, slot, forkserver, cpu)
        self._cpu = cpu
        self._steps = Steps(status_page, slot, self._settings.total_s)
        self._evidence: dict[str, Any] = {}
        self._environment_hash = ""
        self._watch = environment.Watch(slot)
        self._activities: list[Activity] | None = None
        self._memory: health.Memory | None = None
        timed_on_gpu = slot.on_gpu and self._settings.timing.enabled
        self._sharing = health.Sharing(slot.device if timed_on_gpu else None, slot.gpu_shared)
        self._tested = False
        self._granted = granted
        self._ran_out = False  # Becomes True if the reference runs out of memory.
        self._plan = plan.of_first_draw(whole=0, siblings=1, alone=False)  # Nothing is booked yet.
        self._booking: booking.Booking | None = None
        self._pytest_run: pytest_run.PytestRun | None = None
        #: Device objects that a GPU's clock needs.
        self._hold: clocks.Hold | None = None
        self._flusher: clocks.Flusher | None = None
        #: Error figures of all compared calls.
        self._compared: list[dict[str, Any]] = []

    def run(self) -> Outcome:
        """Judge the request."""
        try:
            self._status_page.enter(Phase.PREPARE)
            self._read_source()
            with self._watch:
                self._prepare()
                outcome = self._run_tests() if self._request.backend is Backend.PYTEST else self._judge()
        except EvaluationEnded as ended:
            outcome = ended.outcome
            self._ran_out = isinstance(ended, OutOfAllowance)
            self._note(ended)
        except (torch.OutOfMemoryError, torch.AcceleratorError, CudaCallError) as error:
            # The candidate has its own CUDA context, so an error in the judge's context comes from the device.
            with self._steps.backstop(Phase.CLEANUP):
                hog = self._memory_hog()
            outcome = hog or Outcome(
                category=Category.GPU_UNHEALTHY,
                message=f"the judge's own work on the GPU failed: {type(error).__name__}: {error}",
                facts=Facts(cuda_code=getattr(error, "error_code", None)),
            )
        if self._compared:
            self._evidence["comparison"] = compare.merge_errors(self._compared)
        return self._clean_up(outcome)

    def _note(self, ended: EvaluationEnded) -> None:
        """Record the error figures of a wrong answer."""
        facts = ended.outcome.facts
        if facts.strict_correct is not None:
            self._compared.append({name: getattr(facts, name) for name in ErrorFigures.model_fields})

    def _memory_hog(self) -> Outcome | None:
        """Return the outcome of a kernel that holds more GPU memory than its share, or None if it does not."""
        candidate = self._processes.candidate
        if candidate is None:
            return None
        try:
            self._processes.stop_others()
            before, _ = torch.cuda.mem_get_info()
            candidate.process.stop()
            held = torch.cuda.mem_get_info()[0] - before
        except (torch.AcceleratorError, CudaCallError, ForkServerError):
            return None
        allowed = self._plan.candidate
        if held <= allowed + _SLACK_BYTES:
            return None
        return Outcome(
            category=Category.GPU_OUT_OF_MEMORY,
            message=f"the kernel held {held} bytes of the GPU's memory, and its share is {allowed} bytes",
            phase=Phase.CHECK,
            facts=Facts(held_bytes=held, allowed_bytes=allowed),
        )

    def _check_memory(self, outcome: Outcome) -> Outcome:
        """Blame the fleet if a kernel ran out of GPU memory because it did not get its share."""
        if outcome.category is not Category.GPU_OUT_OF_MEMORY or self._booking is None or self._pytest_run is not None:
            return outcome
        assert self._processes.candidate is not None
        try:
            # All processes of the evaluation are gone. If its booked memory is not free, other processes hold it.
            self._processes.candidate.unbind()
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info()
        except (torch.AcceleratorError, CudaCallError):
            return outcome
        if free >= self._plan.total:
            facts = outcome.facts.model_copy(update={"allowed_bytes": self._plan.candidate})
            return outcome.model_copy(update={"facts": facts})
        return Outcome(
            category=Category.JUDGE_ERROR,
            message=f"other processes hold some of the kernel's {self._plan.candidate} bytes of GPU memory",
            phase=outcome.phase,
            facts=Facts(instead_of=outcome.category, allowed_bytes=self._plan.candidate),
        )

    def _prepare(self) -> None:
        tools.require(self._request.backend)
        self._environment_hash = self._backend.environment(environment.facts(self._slot))
        if self._slot.on_gpu:
            self._memory = health.Memory(self._slot.device)

    def _judge(self) -> Outcome:
        if self._slot.on_gpu:
            self._evidence["tf32"] = self._settings.tf32
        self._processes.begin_reference()
        timed = self._settings.timing.enabled
        with self._warming_up():
            reference, candidate, first = self._begin()
            baseline = self._baseline() if timed else None
            cases, later, last = self._answer(first)
        if timed and self._slot.on_gpu:
            self._hold, self._flusher = clocks.Hold(), clocks.Flusher()
            self._flusher()
        if baseline is not None:
            baseline.get_going()
        self._build(candidate)
        with self._steps.timed("construct"), self._steps.backstop(Phase.CONSTRUCT):
            triton = self._slot.on_gpu and self._request.backend is Backend.TRITON
            candidate.form = reference.form
            reference.cache.present(first)
            candidate.construct(reference.proxy.init_inputs, first, self._plan, warm_up=triton)
        with self._reporting_foreign_processes() as sharing, self._steps.timed("wait_for_strangers"):
            sharing.before_timing()
        stopwatch, series = self._check_and_time(candidate, first, cases, later, last, baseline)
        # The driver takes a while to free the candidate's memory. Meanwhile the reference verifies, and no other slot
        # waits for the device. The driver opens the device for one process at a time, so the next candidate starts now.
        candidate.process.begin_stop()
        self._processes.begin_next()
        if baseline is not None and series is not None and baseline.known is None:
            self._stop(candidate)  # It could disturb the timing of the reference.
            with self._steps.alone("measure_reference"), self._steps.backstop(Phase.TIME):
                baseline.take(series.basis)
                self._see_memory()
        if stopwatch is not None:
            with self._steps.untimed("verify"), self._steps.backstop(Phase.REFERENCE):
                self._evidence["verified_calls"] = stopwatch.verify()
        self._stop(candidate)
        if stopwatch is not None:
            self._test_device()
            self._tested = True
            if stopwatch.has_other_layouts:
                with self._steps.alone("layouts"), self._steps.backstop(Phase.TIME):
                    stopwatch.compare_layouts()
        if self._activities is not None:
            provenance_facts = provenance.assess(self._activities, self._request.kernel, self._request.backend)
            self._evidence["provenance"] = provenance_facts
            provenance.enforce(provenance_facts, self._settings.policies.decoys)
        runtime = measured = None
        if baseline is not None and series is not None:
            measured = baseline.baseline_for(series)
            overhead = timing.overhead_of(series, self._slot, measured)
            runtime = timing.summarise(series, overhead, self._settings.timing, self._slot)
            with self._reporting_foreign_processes() as sharing:
                sharing.after_timing()
            if self._settings.timing.compiled_baseline:
                self._evidence["compiled_baseline"] = baseline.compiled_baseline(series)
            self._enforce_bound(runtime, first)
        checks = self._evidence["checks"]
        hidden = checks - self._evidence["checks_asked"]
        return Outcome(
            category=Category.PASSED,
            message=f"right on {checks} input sets" + (f", {hidden} of them hidden variants" if hidden else ""),
            runtime=runtime,
            baseline=measured,
        )

    def _check_and_time(
        self,
        candidate: Candidate,
        first: Case,
        cases: list[Case],
        later: int,
        last: Case | None,
        baseline: baselines.Baseline | None,
    ) -> tuple[timing.Stopwatch | None, timing.Series | None]:
        """Check and time the candidate. Return its stopwatch and times if there is a baseline to compare with."""
        stopwatch = series = None
        shares = self._shares_checks
        if shares:
            with self._steps.untimed("check"), self._steps.backstop(Phase.CHECK):
                self._evidence |= self._check(candidate, cases, later)
        if baseline is not None or not shares:
            with self._steps.alone("measure"), self._steps.backstop(Phase.CHECK):
                if not shares:
                    self._evidence |= self._check(candidate, cases, later)
                if baseline is not None:
                    self._see_memory()
                    stopwatch = self._stopwatch(candidate, self._proofs())
                    series = self._time(stopwatch, baseline.basis)
                    self._see_memory()
                    self._evidence["floor"] = self._floor()
                    if not shares:
                        self._check_again(candidate, last)
        with self._untimed_if_large("check"), self._steps.backstop(Phase.CHECK):
            if baseline is not None and shares:
                self._check_again(candidate, last)
            self._look_at_provenance(candidate, first)
        return stopwatch, series

    @property
    def _shares_checks(self) -> bool:
        """True if checked calls share the device with other slots' untimed work."""
        # Large inputs keep the device busy, and the CPU idle, for as long as the timing does. For small inputs, the
        # calls take less time than a second wait for the device.
        has_siblings = self._slot.on_gpu and self._slot.siblings > 1
        return has_siblings and self._reference.cache.is_large and _Grant.EXCLUSIVE not in self._granted

    def _missing_grant(self, outcome: Outcome) -> _Grant | None:
        """Return the resource whose lack can have caused the outcome, or None if the evaluation already had it."""
        if self._ran_out:
            grant = _Grant.ALL_MEMORY
        elif outcome.category in _OVERDUE and outcome.phase is not Phase.TIME and "untimed_check" in self._steps.begun:
            grant = _Grant.EXCLUSIVE  # Other slots' work took some of its or the reference's time.
        else:
            return None
        return None if grant in self._granted else grant

    def _run_tests(self) -> Outcome:
        """Run a repository's tests. Their GPU memory use is unknown, so a slot's share is booked."""
        self._book(plan.of_first_draw(**self._whole, alone=False))
        held = partial(health.held_bytes, self._slot.device) if self._slot.on_gpu else lambda: None
        self._pytest_run = pytest_run.PytestRun(self._processes.begin_tests(), self._request, self._plan.total, held)
        with self._steps.untimed("tests"), self._steps.backstop(Phase.CHECK):
            return self._pytest_run.run()

    def _read_source(self) -> None:
        """Check the sources of the kernel and the problem statically."""
        pytest_run.check(self._request)
        if self._request.backend is Backend.PYTEST:
            return
        source, policy = self._request.kernel, self._settings.policies.findings
        static.check_problem(self._request.problem)
        given, own = self._settings.tolerance, static.tolerance(self._request.problem)
        if tolerance := given or own:
            self._evidence["tolerance"] = tolerance.model_dump() | {"by": "settings" if given else "problem"}
        static.check(source)
        if policy is not Policy.ALLOW:
            findings = static.findings(source, self._request.backend)
            self._evidence["findings"] = findings
            static.enforce(findings, policy)

    @contextlib.contextmanager
    def _warming_up(self) -> Generator[None]:
        """Open the device and load the judge's own kernels while the reference draws and answers."""
        if not self._slot.on_gpu:
            yield
            return
        with self._steps.backstop(Phase.PREPARE):
            torch.cuda.synchronize()
            torch.cuda.set_per_process_memory_fraction(1.0)  # The evaluation's plan sets a limit later.
        with ThreadPoolExecutor(1) as pool:
            warm_up = pool.submit(answers.warm_up, self._settings)
            yield
        warm_up.result()

    @property
    def _reference(self) -> Reference:
        reference = self._processes.reference
        assert reference is not None, "the reference's process has begun"
        return reference

    def _begin_compiled(self) -> Exchange:
        """Prepare a process that runs the reference under ``torch.compile``."""
        exchange, job = self._processes.begin_compiled()
        baselines.begin_compiled(exchange, job, self._reference, self._reference.cache.fresh(), self._steps)
        return exchange

    def _build(self, candidate: Candidate) -> None:
        """Compile the sources that the candidate will import."""
        if self._processes.builder is None:
            return
        with self._steps.timed("build"), self._steps.backstop(Phase.COMPILE):
            build = self._processes.build(self._evidence)
        if "skipped" not in build:  # Otherwise the candidate can need the time to compile everything itself.
            candidate.process.charge_compilers(build["seconds"])

    def _begin(self) -> tuple[Reference, Candidate, Case]:
        """Load the problem, answer its first case within booked memory, and fork the candidate."""
        alone = _Grant.ALL_MEMORY in self._granted
        self._book(plan.of_first_draw(**self._whole, alone=alone))
        reference_evidence = self._evidence["reference"] = {}
        with self._steps.timed("reference"), self._steps.backstop(Phase.REFERENCE):
            # The driver opens the device for one process at a time, and the reference needs it first.
            self._reference.proxy.await_opening()
            candidate = self._processes.begin_candidate()
            reference = self._processes.make_reference_ready(reference_evidence, self._plan.reference)
            weights = reference.proxy.taken().weights
            first = reference.cache.first()
            reference.cache.warm_up_variants()
        self._evidence["inputs"] = [
            {"shape": spec.shape, "dtype": str(spec.dtype).removeprefix("torch.")}
            for spec in reference.cache.input_specs
        ]
        self._book(plan.of_first_call(reference.cache.input_bytes, weights, **self._whole, alone=alone))
        with self._untimed_if_large("reference"), self._steps.timed("reference"), self._steps.backstop(Phase.REFERENCE):
            reference.proxy.allow(self._plan.reference)
            reference.oracle.widen()
            reference.answer_first(first)
            peak = reference.proxy.taken().peak
        outputs = first.nbytes - reference.cache.input_bytes
        self._book(plan.settled(reference.cache.input_bytes, outputs, weights, peak, **self._whole))
        with self._steps.backstop(Phase.REFERENCE):
            reference.proxy.allow(self._plan.reference)
        reference.timed_bytes = max(self._plan.reference, self._plan.candidate)
        self._see_memory()
        return reference, candidate, first

    def _untimed_if_large(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Return a lock that excludes timing if the inputs are large enough to disturb it."""
        large = self._slot.on_gpu and self._reference.cache.is_large
        return self._steps.untimed(what) if large else contextlib.nullcontext()

    @cached_property
    def _whole(self) -> dict[str, int]:
        """Memory in bytes that the device's evaluations can book together, and the number of its slots."""
        if not self._slot.on_gpu:
            return {"whole": linux.physical_bytes(), "siblings": self._slot.siblings}
        total = torch.cuda.get_device_properties(0).total_memory
        return {"whole": plan.capacity(total, self._slot.siblings), "siblings": self._slot.siblings}

    def _book(self, wanted: plan.Plan) -> None:
        """Book a plan's GPU memory. If it is not free at once, release the earlier booking and wait."""
        self._plan = wanted
        if not self._slot.on_gpu:
            return
        ledger = booking.Ledger(self._slot.ledger, self._whole["whole"])
        if self._booking is None or not self._booking.resize(wanted.total):
            if self._booking is not None:
                with self._steps.backstop(Phase.REFERENCE):
                    self._reference.cache.clear()
                self._booking.release()
            self._status_page.enter(Phase.PREPARE)
            try:
                with self._steps.timed("wait_for_memory"):
                    left_s = max(0.0, GPU_WAIT_S - self._steps.durations.get("wait_for_memory", 0.0))
                    self._booking = ledger.book(wanted.total, label=self._slot.name, wait_s=left_s)
            except booking.TooLarge:
                needs, has = wanted.total, self._whole["whole"]
                raise EvaluationEnded(
                    Category.REFERENCE_ERROR,
                    f"the problem needs {needs / 2**30:.1f} GiB of the GPU's memory, of which evaluations can use"
                    f" {has / 2**30:.1f} GiB",
                    Phase.REFERENCE,
                    needed_bytes=needs,
                    allowed_bytes=has,
                ) from None
            except booking.NotInTime as error:
                raise EvaluationEnded(Category.JUDGE_ERROR, str(error), Phase.PREPARE) from None
        # The first draw can be in a kept reference, which has that memory already.
        is_new = wanted.inputs or self._request.backend is Backend.PYTEST
        if is_new and torch.cuda.mem_get_info()[0] < wanted.total:
            ledger.want_room()
        used = self._evidence.get("gpu_memory", {}).get("used_bytes")
        self._evidence["gpu_memory"] = wanted.evidence() | ({"used_bytes": used} if used else {})
        if wanted.judge:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, wanted.judge / total))

    def _see_memory(self) -> None:
        """Record the GPU memory that the evaluation's processes hold, if it is large."""
        figures = self._evidence.get("gpu_memory")
        if figures is None or self._plan.inputs + (self._plan.outputs or 0) < _MUCH_BYTES:
            return
        held = health.held_bytes(self._slot.device)
        if held is not None:
            figures["used_bytes"] = max(held, figures.get("used_bytes", 0))

    def _answer(self, first: Case) -> tuple[list[Case], int, Case | None]:
        """Return the cases to check now, the number of given cases to draw later, and the case for after the timing."""
        # If all cases would take too much memory together, each is drawn and answered when it is checked.
        reference = self._reference
        lock = self._untimed_if_large("reference") if reference.cache.is_roomy else contextlib.nullcontext()
        with lock, self._steps.timed("reference"), self._steps.backstop(Phase.REFERENCE):
            cases = reference.more_cases(first)
            last: list[Case] = []
            if reference.cache.is_roomy:
                last = [reference.cache.another()] if self._settings.timing.enabled else []
                # The first variant's float64 answers load kernels. Here that does not delay the timing of other slots.
                reference.answer(first, *cases[self._settings.checks - 1 :][:1])
        with self._steps.untimed("reference"):
            with self._steps.backstop(Phase.REFERENCE):
                if (region := sensitivity.learn(reference, first)) is not None:
                    cases.append(region)
                if self._slot.on_gpu and not reference.cache.is_roomy:
                    torch.cuda.empty_cache()  # Free the copy of an output before lasting tensors are allocated.
                answered = (
                    reference.answer(first, *cases, *last) if reference.cache.is_roomy else reference.answer(first)
                )
                # The comparison loads kernels and buffers at first use. Load them before a kernel is compared.
                compare.check_values(first.outputs, first, self._settings)
                if self._slot.on_gpu and self._settings.timing.enabled:
                    reference.cache.stock(timing.usual_calls(self._settings.timing, _OVERHEAD_SHARE))
            # Test the device before the kernel uses it. This also loads the code that later tests need.
            self._test_device()
        if not reference.cache.is_roomy:
            return [first, *cases], self._settings.checks - 1, None
        return [case for case in answered if case not in last], 0, last[0] if last else None

    def _proofs(self) -> int:
        """Return the number of timed calls to verify, limited by the reference's speed."""
        by_time = max(int(_PROOFS_S / self._reference.forward_s), _SLOW_PROOFS)
        by_deadline = int(self._reference.proxy.left_s / 2 / self._reference.forward_s)
        most = _MOST_PROOFS if self._slot.on_gpu else _SLOW_PROOFS
        return max(_FEWEST_PROOFS, min(most, by_time, by_deadline))

    def _check(self, candidate: Candidate, cases: list[Case], later: int) -> dict[str, Any]:
        """Make all checked calls: every case once, and the first case again."""
        with self._steps.timed("check"):
            candidate.prepare_calls(self._reference.form.output_specs)
            checked = 0
            every = chain(cases, (self._reference.cache.fresh() for _ in range(later)))
            try:
                for case in every:
                    if self._has_answered(case):
                        checked += 1
                        self._compared.append(self._check_case(candidate, case))
            except EvaluationEnded as ended:
                if ended.outcome.category in _ABOUT_VALUES:
                    self._note(ended)
                    self._compare_rest(candidate, every)
                raise
            try:
                with self._confirming(cases[0]):
                    self._compared.append(self._run(candidate, cases[0]))
            except EvaluationEnded as ended:
                raise _unless_repeated(ended, "right at first, wrong when the same input was run again") from None
        return {
            "checks": checked,
            "checks_asked": self._settings.checks,
            "reference_is_constant": self._reference.is_constant,
        }

    def _compare_rest(self, candidate: Candidate, cases: Iterable[Case]) -> None:
        """Compare further given cases until a kernel that failed one of the two verdicts has failed both."""
        with contextlib.suppress(EvaluationEnded):  # The reference's failure no longer matters.
            for case in cases:
                errors = compare.merge_errors(self._compared)
                if not (errors["strict_correct"] or errors["kernelbench_correct"]):
                    return
                if case.kind == GIVEN:
                    self._compare_one(candidate, case)

    def _compare_one(self, candidate: Candidate, case: Case) -> None:
        """Compare one more answer of a wrong kernel. A missing answer fails both verdicts."""
        try:
            self._compared.append(self._run(candidate, case))
        except EvaluationEnded as ended:
            self._note(ended)
            if ended.outcome.category not in _ABOUT_VALUES:
                self._compared.append({"strict_correct": False, "kernelbench_correct": False})

    def _run(self, candidate: Candidate, case: Case) -> dict[str, Any]:
        """Make one checked call on a case."""
        self._has_answered(case)
        return candidate.run(case)

    def _has_answered(self, case: Case) -> bool:
        """Return whether the reference has an answer to the case, after running it if needed."""
        with self._steps.backstop(Phase.REFERENCE):
            answered = bool(self._reference.answer(case))
        self._status_page.enter(Phase.CHECK)
        return answered

    def _check_again(self, candidate: Candidate, case: Case | None) -> None:
        """Make one checked call on a new input after the timing."""
        candidate.process.enter(Phase.CHECK, self._deadlines.check_s)
        case = case or self._reference.cache.fresh()
        try:
            with self._confirming(case):
                self._run(candidate, case)
        except EvaluationEnded as ended:
            raise _unless_repeated(ended, "right before it was timed, wrong after") from None

    def _check_case(self, candidate: Candidate, case: Case) -> dict[str, Any]:
        try:
            with self._confirming(case):
                return self._run(candidate, case)
        except EvaluationEnded as ended:
            if ended.outcome.category not in _ABOUT_VALUES:
                raise
            first = ended
        if not self._has_answered(case):
            return {}  # The reference did not confirm its answer to the variant.
        try:
            self._run(candidate, case)
        except EvaluationEnded:
            raise first from None
        raise _unless_repeated(first, "wrong at first, right when the same input was run again")

    @contextlib.contextmanager
    def _confirming(self, case: Case) -> Generator[None]:
        """Confirm the reference's answer to a case before a kernel is called wrong on it."""
        try:
            yield
        except EvaluationEnded as ended:
            if ended.outcome.category in _ABOUT_VALUES:
                with self._steps.backstop(Phase.REFERENCE):
                    self._reference.confirm(case)
                self._status_page.enter(Phase.CHECK)
            raise

    def _look_at_provenance(self, candidate: Candidate, case: Case) -> None:
        """Profile the candidate to learn which kernels do its work. This comes last: it can end the candidate."""
        if not self._slot.on_gpu or self._settings.policies.decoys is Policy.ALLOW:
            return
        with self._steps.timed("provenance"):
            self._has_answered(case)
            try:
                self._activities = candidate.profile(case)
            except NotRecorded as error:
                self._evidence["provenance_error"] = str(error)
            except EvaluationEnded as ended:
                self._evidence["provenance_error"] = str(ended)
                if self._settings.policies.decoys is Policy.REJECT:
                    raise  # A candidate could end itself to escape profiling.

    def _stopwatch(self, exchange: Exchange, proofs: int) -> timing.Stopwatch:
        seconds = self._deadlines.time_s
        exchange.process.enter(Phase.TIME, seconds)
        hold, flusher = self._hold, self._flusher
        return timing.Stopwatch(exchange, self._reference, self._slot, seconds, hold, flusher, self._watch, proofs)

    def _time(self, stopwatch: timing.Stopwatch, basis: timing.Basis) -> timing.Series:
        with self._steps.timed("time"):
            return stopwatch.measure(self._settings.timing, basis=basis, overhead_share=_OVERHEAD_SHARE)

    def _baseline(self) -> baselines.Baseline:
        return baselines.Baseline(
            self._request,
            self._slot,
            self._backend,
            self._environment_hash,
            self._steps,
            self._reference,
            begin_compiled=self._begin_compiled,
            stopwatch=partial(self._stopwatch, proofs=0),
            evidence=self._evidence,
        )

    def _floor(self) -> dict[str, Any]:
        """Return the figures of the speed-of-light bound, empty on a CPU."""
        if self._flusher is None:
            return {}
        return speed_of_light.floor(
            self._reference.cache.input_bytes, self._reference.written_bytes, self._flusher.bandwidth()
        )

    def _enforce_bound(self, runtime: Measurement, first: Case) -> None:
        """Reject a time that is too short to move the required bytes through memory."""
        bound = self._evidence["floor"]
        if not bound:
            return
        speed_of_light.enforce(bound, runtime)
        cached = speed_of_light.cacheable(runtime, torch.cuda.get_device_properties(0).L2_cache_size)
        if speed_of_light.is_beyond(bound, runtime, cached):
            with self._steps.untimed("influence"), self._steps.backstop(Phase.REFERENCE):
                needed = sensitivity.needed_bytes(self._reference, first, self._room_for_questions())
            self._evidence["floor"] = speed_of_light.needing(bound, needed, cached)
            speed_of_light.enforce(self._evidence["floor"], runtime)

    def _room_for_questions(self) -> int:
        """Return the bytes of GPU memory that the reference can use now that the kernel's share is free."""
        # More is booked for changed inputs and float64 if it is available at once.
        free = self._plan.reference + self._plan.candidate
        wanted = 2 * (self._plan.inputs + self._plan.reference)
        if wanted > free and self._booking is not None and self._booking.resize(self._plan.judge + wanted):
            return wanted
        return free

    def _stop(self, candidate: Candidate) -> None:
        """End a candidate that has finished its calls, and reject leftovers."""
        self._status_page.enter(Phase.CLEANUP)
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
                f"the kernel left {report.leftovers} process(es) behind",
                Phase.CLEANUP,
                leftovers=report.leftovers,
            )

    def _clean_up(self, outcome: Outcome) -> Outcome:
        """End the running processes, and complete the outcome with the candidate's log and the evidence."""
        self._status_page.enter(Phase.CLEANUP)
        evidence = self._evidence
        reports: dict[SealedProcess, Report] = {}
        processes = self._processes
        with self._steps.backstop(Phase.CLEANUP):
            if why := processes.end(outcome, reports):
                evidence["cleanup"] = why
            for process in reports:
                process.imports.close()  # Otherwise its memory would outlive it and belong to no process.
            if processes.reference is not None:
                processes.reference.proxy.free_arena()
        outcome = killed.settle(outcome, reports.values(), alone=self._slot.alone)
        outcome = self._check_device(self._check_memory(self._check_disk(outcome, list(reports.values()))))
        missing = self._missing_grant(outcome)
        if self._pytest_run is None and self._settings.examine and missing is None and examine.is_worthwhile(outcome):
            self._examine()
        if outcome.blame in (Blame.NONE, Blame.CANDIDATE):
            self._processes.begin_next()
        if self._booking is not None:
            self._booking.release()
        if missing is not None:
            raise _NeedsGrant(missing)
        evidence["durations_s"] = {name: round(value, 6) for name, value in self._steps.durations.items()}
        evidence["begun_s"] = {name: round(value, 6) for name, value in self._steps.begun.items()}
        evidence["cpu_s"] = self._cpu.seconds()
        evidence["isolation"] = self._forkserver.isolation
        evidence["slots_on_device"] = self._slot.siblings
        if self._steps.waited_for:
            evidence["waited_for"] = tuple(self._steps.waited_for)
        log = ""
        candidate, reference, builder = processes.candidate, processes.reference, processes.builder
        if candidate is not None and (report := reports.get(candidate.process)) is not None:
            log = (builder.log if builder is not None else "") + report.log
            evidence |= {"peak_bytes": report.peak_bytes, "output_bytes": report.output_bytes}
        if outcome.blame is Blame.PROBLEM and reference is not None and reference.process in reports:
            log = reports[reference.process].log
        if self._pytest_run is not None:
            evidence |= self._pytest_run.evidence
            for report in reports.values():
                log = "\n".join(filter(None, (self._pytest_run.log, report.log)))
                evidence |= {"peak_bytes": report.peak_bytes, "output_bytes": report.output_bytes}
        return outcome.model_copy(update={"log": _CONTROL.sub("\ufffd", log), "evidence": evidence})

    def _examine(self) -> None:
        """Run the kernel again under the requested tools, without effect on the verdict."""
        asked = self._settings.examine
        if not self._slot.on_gpu:
            why = {"error": "it needs a GPU", "seconds": 0.0}
            self._evidence["sanitized"] = [{"tool": tool} | why for tool in asked.sanitize] or None
            self._evidence["profile"] = ({"by": "ncu"} | why) if asked.profile else None
            return
        examiner = self._processes.examiner(self._steps)
        try:
            if asked.sanitize:
                self._evidence["sanitized"] = [examiner.sanitize(tool) for tool in asked.sanitize]
            if asked.profile:
                self._evidence["profile"] = examiner.profile(self._activities)
            self._test_device()
        except (EvaluationEnded, torch.AcceleratorError, CudaCallError) as error:
            self._backend.doubt(self._slot.device, f"after a kernel was examined: {error}")

    def _check_disk(self, outcome: Outcome, reports: list[Report]) -> Outcome:
        """Blame the fleet if the host's disk is full for other reasons than the kernel's own files."""
        # Sealed processes with their own file systems do not need the host's disk.
        if outcome.blame not in (Blame.CANDIDATE, Blame.PROBLEM) or self._forkserver.isolation["mounts"] is True:
            return outcome
        disk = os.statvfs(self._slot.scratch)
        room = disk.f_bavail * disk.f_frsize + sum(report.scratch_bytes for report in reports)
        if room >= _ROOM_BYTES:
            return outcome
        return Outcome(
            category=Category.JUDGE_ERROR,
            message=f"the disk of {self._slot.scratch} is full",
            phase=outcome.phase,
            facts=Facts(room_bytes=room, instead_of=outcome.category),
        )

    def _check_device(self, outcome: Outcome) -> Outcome:
        """Test the GPU after the candidate is gone. Replace the outcome if the GPU is damaged."""
        nothing_ran = self._processes.candidate is None and self._pytest_run is None
        if not self._slot.on_gpu or nothing_ran or outcome.category is Category.GPU_UNHEALTHY:
            return outcome
        leaked = self._evidence["leaked_bytes"] = self._memory.leak() if self._memory is not None else None
        if leaked:
            reason = f"{leaked} bytes of its memory belong to no process after an evaluation"
            self._backend.doubt(self._slot.device, reason)
        if self._tested:
            return outcome
        try:
            self._test_device()
        except EvaluationEnded as ended:
            failed = ended.outcome
            return failed.model_copy(update={"facts": failed.facts.model_copy(update={"instead_of": outcome.category})})
        return outcome

    def _test_device(self) -> None:
        """Run the GPU self-test, which takes milliseconds."""
        if not self._slot.on_gpu:
            return
        self._status_page.enter(Phase.SELF_TEST, time.monotonic() + health.SELF_TEST_S)
        with self._steps.timed("canary"):
            self._evidence["canary"] = health.test()
        self._status_page.enter(Phase.PREPARE)

    @contextlib.contextmanager
    def _reporting_foreign_processes(self) -> Generator[health.Sharing]:
        """Record in the evidence which foreign processes were seen on the GPU."""
        try:
            yield self._sharing
        finally:
            if self._slot.on_gpu and self._settings.timing.enabled:
                strangers = self._sharing.strangers
                self._evidence["strangers"] = "unknown" if strangers is None else strangers


def _unless_repeated(ended: EvaluationEnded, how: str) -> EvaluationEnded:
    """Return ``nondeterministic`` for a wrong answer on an input that was also answered right, or else ``ended``."""
    outcome = ended.outcome
    if outcome.category not in _ABOUT_VALUES:
        return ended
    return EvaluationEnded(
        Category.NONDETERMINISTIC, f"{how}: {outcome.message}", Phase.CHECK, **outcome.facts.model_dump()
    )
