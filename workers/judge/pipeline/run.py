"""One evaluation, from a request to an outcome.

Order: what can be settled without a device; the reference and the judge open the device, then the candidate; the
reference imports the problem, draws inputs and answers them; only then does any of the kernel's code run, so that it
cannot disturb the reference: import, construction, compilation, checks and timing. The device is used alone (the
place's lock) for the timing, and for the checks of small inputs. What the reference answers and verifies overlaps with
the same of other places, and with nobody's timing, as do the checks of large inputs; everything else overlaps with all
that other places do.
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

#: A candidate's own nulls, as a share of its calls.
_OVERHEAD_SHARE: Final = 0.2
#: How many timed calls are verified: as many as the reference answers in this time (in seconds), but not few for
#: that alone.
_MOST_PROOFS: Final = 16
_SLOW_PROOFS: Final = 8
_FEWEST_PROOFS: Final = 2
_PROOFS_S: Final = 0.05
#: What a candidate's own CUDA context and kernels take of a GPU's memory, generously, in bytes.
_SLACK_BYTES: Final = 2 << 30
#: What a log may not hold where people read it: a terminal or a page would obey it.
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
#: Inputs and outputs of which it is noted what the evaluation's processes really hold, in bytes.
_MUCH_BYTES: Final = 256 << 20
#: Categories that another run on the same input can overturn.
_ABOUT_VALUES: Final = frozenset({Category.WRONG_VALUES, Category.NOT_FINITE})
#: Ends of checks that took too long: the kernel's, or the reference's, which draws and answers between them.
_OVERDUE: Final = frozenset({Category.TIMEOUT, Category.REFERENCE_TIMEOUT})
#: Whoever fails where the disk has less room than this besides its own files may have failed for that, in bytes.
_ROOM_BYTES: Final = 64 << 20


class _Scarce(enum.Enum):
    """What an evaluation has of a GPU only when it has failed without, as all others wait meanwhile."""

    #: All memory, for the reference's first call.
    ALL_MEMORY = enum.auto()
    #: The device alone, for checked calls on large inputs.
    ALONE = enum.auto()


def evaluate(
    request: Request, slot: SlotConfig, backend: JudgeBackend, status_page: StatusPage, forkserver: ForkServer
) -> Outcome:
    """Judge one request, in this process.

    Args:
        request: what to judge.
        slot: where.
        backend: where environments, baselines and doubts about a GPU are kept.
        status_page: told of each phase, for whoever must explain this process's death.
        forkserver: the place's.

    Returns:
        the outcome: the candidate's, the problem's, or the fleet's (``gpu_unhealthy``, for instance).

    Raises:
        Exception: the judge itself failed; nothing is known of the kernel.
    """
    cpu = CpuTime()
    granted: set[_Scarce] = set()
    while True:
        try:
            return _Evaluation(request, slot, backend, status_page, forkserver, cpu, frozenset(granted)).run()
        except _Lacking as lacking:
            granted.add(lacking.what)


class _Lacking(Exception):
    """An evaluation failed for want of what it was not given at once: it begins anew, and has that."""

    def __init__(self, what: _Scarce) -> None:
        super().__init__(what)
        self.what = what


class _Evaluation:
    def __init__(
        self,
        request: Request,
        slot: SlotConfig,
        backend: JudgeBackend,
        status_page: StatusPage,
        forkserver: ForkServer,
        cpu: CpuTime,
        granted: frozenset[_Scarce],
    ) -> None:
        """Prepare an evaluation.

        Args:
            request, slot, backend, status_page, forkserver: as for :func:`evaluate`.
            cpu: counts what is used of CPUs.
            granted: what it has of the GPU that is scarce, as it has failed without.
        """
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
        self._ran_out = False  # the reference, of memory
        self._plan = plan.of_first_draw(whole=0, siblings=1, alone=False)  # nothing yet
        self._booking: booking.Booking | None = None
        self._pytest_run: pytest_run.PytestRun | None = None
        #: What a GPU's clock needs.
        self._hold: clocks.Hold | None = None
        self._flusher: clocks.Flusher | None = None
        #: The figures of all calls that were compared.
        self._compared: list[dict[str, Any]] = []

    def run(self) -> Outcome:
        """See :func:`evaluate`."""
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
            # The candidate has a context of its own: an error in the judge's is the device's.
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
        """Keep the figures of a wrong answer."""
        facts = ended.outcome.facts
        if facts.strict_correct is not None:
            self._compared.append({name: getattr(facts, name) for name in ErrorFigures.model_fields})

    def _memory_hog(self) -> Outcome | None:
        """Return the outcome of a kernel that holds more of the GPU's memory than it was given; None if none does."""
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
            message=f"the kernel held {held} bytes of the GPU's memory, of which {allowed} are its share",
            phase=Phase.CHECK,
            facts=Facts(held_bytes=held, allowed_bytes=allowed),
        )

    def _check_memory(self, outcome: Outcome) -> Outcome:
        """Look whether a kernel that ran out of the GPU's memory was given what its plan promised.

        All processes of the evaluation are gone: what it had booked must be free, or others hold it.
        """
        if outcome.category is not Category.GPU_OUT_OF_MEMORY or self._booking is None or self._pytest_run is not None:
            return outcome
        assert self._processes.candidate is not None
        try:
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
            message=f"the kernel was promised {self._plan.candidate} bytes of the GPU's memory, which others hold",
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
            reference.present(first)
            candidate.construct(reference.init_inputs, first, self._plan, warm_up=triton)
        with self._reporting_foreign_processes() as sharing, self._steps.timed("wait_for_strangers"):
            sharing.before_timing()
        stopwatch, series = self._check_and_time(candidate, first, cases, later, last, baseline)
        # Its end takes a while, as the driver takes its memory back: the reference verifies meanwhile, and nobody waits
        # for it who wants the device. And the driver opens that for one process after the other: the next candidate
        # gets in line.
        candidate.process.begin_stop()
        self._processes.begin_next()
        if baseline is not None and series is not None and baseline.known is None:
            self._stop(candidate)  # it could disturb what is timed now
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
            found = provenance.assess(self._activities, self._request.kernel, self._request.backend)
            self._evidence["provenance"] = found
            provenance.enforce(found, self._settings.policies.decoys)
        runtime = known = None
        if baseline is not None and series is not None:
            known = baseline.baseline_for(series)
            null = timing.overhead_of(series, self._slot, known)
            runtime = timing.summarise(series, null, self._settings.timing, self._slot)
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
            baseline=known,
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
        """Have the candidate do all that it is asked. Returns its times, where there is a baseline to hold them to."""
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
        """Whether calls are checked while others, but for those who time, use the device too.

        Large inputs keep a device busy, and its processor idle beside it, for as long as the timing does. The calls of
        small ones are over sooner than a second wait for the device.
        """
        others = self._slot.on_gpu and self._slot.siblings > 1
        return others and self._reference.is_large and _Scarce.ALONE not in self._granted

    def _lacks(self, outcome: Outcome) -> _Scarce | None:
        """Return what the evaluation may have failed for want of, and has when it begins anew."""
        if self._ran_out:
            what = _Scarce.ALL_MEMORY
        elif outcome.category in _OVERDUE and outcome.phase is not Phase.TIME and "untimed_check" in self._steps.begun:
            what = _Scarce.ALONE  # others' work has taken of its time, or of the reference's
        else:
            return None
        return None if what in self._granted else what

    def _run_tests(self) -> Outcome:
        """Run tests of a repository. What they take of the GPU's memory nobody knows: a place's share is booked."""
        self._book(plan.of_first_draw(**self._whole, alone=False))
        held = partial(health.held_bytes, self._slot.device) if self._slot.on_gpu else lambda: None
        self._pytest_run = pytest_run.PytestRun(self._processes.begin_tests(), self._request, self._plan.total, held)
        with self._steps.untimed("tests"), self._steps.backstop(Phase.CHECK):
            return self._pytest_run.run()

    def _read_source(self) -> None:
        """Say what can be said of kernel and problem by reading them."""
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
        """See that the device is open, and load the judge's own kernels while the reference draws and answers."""
        if not self._slot.on_gpu:
            yield
            return
        with self._steps.backstop(Phase.PREPARE):
            torch.cuda.synchronize()
            torch.cuda.set_per_process_memory_fraction(1.0)  # until this evaluation's plan is known
        with ThreadPoolExecutor(1) as pool:
            warm_up = pool.submit(answers.warm_up, self._settings)
            yield
        warm_up.result()

    @property
    def _reference(self) -> Reference:
        reference = self._processes.reference
        assert reference is not None, "it is begun before anything else"
        return reference

    def _begin_compiled(self) -> Exchange:
        """Make a process ready that runs the reference under ``torch.compile``."""
        exchange, job = self._processes.begin_compiled()
        baselines.begin_compiled(exchange, job, self._reference, self._reference.fresh(), self._steps)
        return exchange

    def _build(self, candidate: Candidate) -> None:
        """Have compiled what the candidate is going to import."""
        if self._processes.builder is None:
            return
        with self._steps.timed("build"), self._steps.backstop(Phase.COMPILE):
            found = self._processes.build(self._evidence)
        if "skipped" not in found:  # else the candidate may have to compile it all
            candidate.process.charge_compilers(found["seconds"])

    def _begin(self) -> tuple[Reference, Candidate, Case]:
        """Have the problem imported and its first case answered, within memory that is booked.

        The candidate is forked meanwhile, but not before the reference has opened the device.

        Returns:
            the reference; the candidate, which runs nothing yet; and the case.
        """
        alone = _Scarce.ALL_MEMORY in self._granted
        self._book(plan.of_first_draw(**self._whole, alone=alone))
        told = self._evidence["reference"] = {}
        with self._steps.timed("reference"), self._steps.backstop(Phase.REFERENCE):
            self._reference.await_opening()
            candidate = self._processes.begin_candidate()
            reference = self._processes.make_reference_ready(told, self._plan.reference)
            weights = reference.taken().weights
            first = reference.first_case()
            reference.warm_up_variants()
        self._evidence["inputs"] = [
            {"shape": spec.shape, "dtype": str(spec.dtype).removeprefix("torch.")} for spec in reference.input_specs
        ]
        self._book(plan.of_first_call(reference.input_bytes, weights, **self._whole, alone=alone))
        with self._untimed_if_large("reference"), self._steps.timed("reference"), self._steps.backstop(Phase.REFERENCE):
            reference.allow(self._plan.reference)
            reference.widen()
            reference.answer_first(first)
            peak = reference.taken().peak
        outputs = first.nbytes - reference.input_bytes
        self._book(plan.settled(reference.input_bytes, outputs, weights, peak, **self._whole))
        with self._steps.backstop(Phase.REFERENCE):
            reference.allow(self._plan.reference)
        reference.timed_bytes = max(self._plan.reference, self._plan.candidate)
        self._see_memory()
        return reference, candidate, first

    def _untimed_if_large(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Let nobody time meanwhile, for what need not be had so, if it would disturb."""
        large = self._slot.on_gpu and self._reference.is_large
        return self._steps.untimed(what) if large else contextlib.nullcontext()

    @cached_property
    def _whole(self) -> dict[str, int]:
        """What the evaluations of the device may book together, and how many they are."""
        if not self._slot.on_gpu:
            return {"whole": linux.physical_bytes(), "siblings": self._slot.siblings}
        total = torch.cuda.get_device_properties(0).total_memory
        return {"whole": plan.capacity(total, self._slot.siblings), "siblings": self._slot.siblings}

    def _book(self, wanted: plan.Plan) -> None:
        """Book what a plan takes of the GPU's memory; wait for it, holding nothing, if it is not to be had at once.

        Raises:
            EvaluationEnded: ``reference_error``: the GPU does not have so much; ``judge_error``: others held it for
                longer than an evaluation waits.
        """
        self._plan = wanted
        if not self._slot.on_gpu:
            return
        ledger = booking.Ledger(self._slot.ledger, self._whole["whole"])
        if self._booking is None or not self._booking.resize(wanted.total):
            if self._booking is not None:
                with self._steps.backstop(Phase.REFERENCE):
                    self._reference.clear()
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
                    f"the problem needs {needs / 2**30:.1f} GiB of the GPU's memory, of which evaluations may use"
                    f" {has / 2**30:.1f} GiB",
                    Phase.REFERENCE,
                    needed_bytes=needs,
                    allowed_bytes=has,
                ) from None
            except booking.NotInTime as error:
                raise EvaluationEnded(Category.JUDGE_ERROR, str(error), Phase.PREPARE) from None
        # A first draw alone may be a kept reference's, which has that memory.
        is_new = wanted.inputs or self._request.backend is Backend.PYTEST
        if is_new and torch.cuda.mem_get_info()[0] < wanted.total:
            ledger.want_room()
        used = self._evidence.get("gpu_memory", {}).get("used_bytes")
        self._evidence["gpu_memory"] = wanted.evidence() | ({"used_bytes": used} if used else {})
        if wanted.judge:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, wanted.judge / total))

    def _see_memory(self) -> None:
        """Note what the evaluation's processes hold of the GPU's memory, where that is much."""
        told = self._evidence.get("gpu_memory")
        if told is None or self._plan.inputs + (self._plan.outputs or 0) < _MUCH_BYTES:
            return
        held = health.held_bytes(self._slot.device)
        if held is not None:
            told["used_bytes"] = max(held, told.get("used_bytes", 0))

    def _answer(self, first: Case) -> tuple[list[Case], int, Case | None]:
        """Have the reference answer the cases to check, and one for after the timing.

        Where they would take too much memory together there is only the first: the others are made and answered one by
        one, when they are checked.

        Returns:
            the cases to check now, how many of the problem's own are left for later, and the one for after.
        """
        reference = self._reference
        lock = self._untimed_if_large("reference") if reference.is_roomy else contextlib.nullcontext()
        with lock, self._steps.timed("reference"), self._steps.backstop(Phase.REFERENCE):
            cases = reference.more_cases(first)
            last: list[Case] = []
            if reference.is_roomy:
                last = [reference.another()] if self._settings.timing.enabled else []
                # The first variant's answers in float64 load kernels: while others may use the device.
                reference.answer(first, *cases[self._settings.checks - 1 :][:1])
        with self._steps.untimed("reference"):
            with self._steps.backstop(Phase.REFERENCE):
                if (region := sensitivity.learn(reference, first)) is not None:
                    cases.append(region)
                if self._slot.on_gpu and not reference.is_roomy:
                    torch.cuda.empty_cache()  # it copied an answer: what is to stay must not lie where that lay
                answered = reference.answer(first, *cases, *last) if reference.is_roomy else reference.answer(first)
                # The comparison's own kernels and buffers are loaded at first use: now, before a kernel is compared.
                compare.check_values(first.outputs, first, self._settings)
                if self._slot.on_gpu and self._settings.timing.enabled:
                    reference.stock(timing.usual_calls(self._settings.timing, _OVERHEAD_SHARE))
            # The device is seen to be well before a kernel has it. That loads what a later test needs.
            self._test_device()
        if not reference.is_roomy:
            return [first, *cases], self._settings.checks - 1, None
        return [case for case in answered if case not in last], 0, last[0] if last else None

    def _proofs(self) -> int:
        """Return how many timed calls are verified, as the reference's speed allows."""
        by_time = max(int(_PROOFS_S / self._reference.forward_s), _SLOW_PROOFS)
        by_deadline = int(self._reference.left_s / 2 / self._reference.forward_s)
        most = _MOST_PROOFS if self._slot.on_gpu else _SLOW_PROOFS
        return max(_FEWEST_PROOFS, min(most, by_time, by_deadline))

    def _check(self, candidate: Candidate, cases: list[Case], later: int) -> dict[str, Any]:
        """All checked calls: every case once, and the first one again."""
        with self._steps.timed("check"):
            candidate.prepare_calls(self._reference.output_specs)
            checked = 0
            every = chain(cases, (self._reference.fresh() for _ in range(later)))
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
        """Go on with the problem's own inputs until a kernel that has failed one verdict has failed both."""
        with contextlib.suppress(EvaluationEnded):  # the reference's failure changes nothing any more
            for case in cases:
                known = compare.merge_errors(self._compared)
                if not (known["strict_correct"] or known["kernelbench_correct"]):
                    return
                if case.kind == GIVEN:
                    self._compare_one(candidate, case)

    def _compare_one(self, candidate: Candidate, case: Case) -> None:
        """Compare one more answer of a wrong kernel. If there is none it is right by neither verdict."""
        try:
            self._compared.append(self._run(candidate, case))
        except EvaluationEnded as ended:
            self._note(ended)
            if ended.outcome.category not in _ABOUT_VALUES:
                self._compared.append({"strict_correct": False, "kernelbench_correct": False})

    def _run(self, candidate: Candidate, case: Case) -> dict[str, Any]:
        """Make one checked call on a case; see :meth:`Candidate.run`."""
        self._has_answered(case)
        return candidate.run(case)

    def _has_answered(self, case: Case) -> bool:
        """Have the reference answer a case, unless it holds its answer. Return False for a variant that it does not."""
        with self._steps.backstop(Phase.REFERENCE):
            answered = bool(self._reference.answer(case))
        self._status_page.enter(Phase.CHECK)
        return answered

    def _check_again(self, candidate: Candidate, case: Case | None) -> None:
        """One more checked call, on an input that it has not seen, when timing is over."""
        candidate.process.enter(Phase.CHECK, self._deadlines.check_s)
        case = case or self._reference.fresh()
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
            return {}  # asked again, the reference does not stand by its answer to a variant
        try:
            self._run(candidate, case)
        except EvaluationEnded:
            raise first from None
        raise _unless_repeated(first, "wrong at first, right when the same input was run again")

    @contextlib.contextmanager
    def _confirming(self, case: Case) -> Generator[None]:
        """Before a kernel is called wrong on a case, see that the reference agrees with itself."""
        try:
            yield
        except EvaluationEnded as ended:
            if ended.outcome.category in _ABOUT_VALUES:
                with self._steps.backstop(Phase.REFERENCE):
                    self._reference.confirm(case)
                self._status_page.enter(Phase.CHECK)
            raise

    def _look_at_provenance(self, candidate: Candidate, case: Case) -> None:
        """Ask the candidate whose kernels do its work. It is only asked when all else is known."""
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
                    raise  # one that dies rather than be looked at

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
        """Return what memory allows, in figures; empty on a CPU."""
        if self._flusher is None:
            return {}
        return speed_of_light.floor(
            self._reference.input_bytes, self._reference.written_bytes, self._flusher.bandwidth()
        )

    def _enforce_bound(self, runtime: Measurement, first: Case) -> None:
        """Refuse a time in which memory cannot have moved what must be moved."""
        known = self._evidence["floor"]
        if not known:
            return
        speed_of_light.enforce(known, runtime)
        cached = speed_of_light.cacheable(runtime, torch.cuda.get_device_properties(0).L2_cache_size)
        if speed_of_light.is_beyond(known, runtime, cached):
            with self._steps.untimed("influence"), self._steps.backstop(Phase.REFERENCE):
                needed = sensitivity.needed_bytes(self._reference, first, self._room_for_questions())
            self._evidence["floor"] = speed_of_light.needing(known, needed, cached)
            speed_of_light.enforce(self._evidence["floor"], runtime)

    def _room_for_questions(self) -> int:
        """Return the bytes that the reference may take of the GPU's memory now that the kernel is gone.

        What was promised to the kernel is free. For inputs that are changed, in float64 too, more is booked if it can
        be had at once.
        """
        free = self._plan.reference + self._plan.candidate
        wanted = 2 * (self._plan.inputs + self._plan.reference)
        if wanted > free and self._booking is not None and self._booking.resize(self._plan.judge + wanted):
            return wanted
        return free

    def _stop(self, candidate: Candidate) -> None:
        """End a candidate that has done all that was asked, and look at what it leaves."""
        self._status_page.enter(Phase.CLEANUP)
        # One that has not survived being profiled has done all that counts.
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
        """End what still runs, and complete the outcome with the candidate's log and the evidence."""
        self._status_page.enter(Phase.CLEANUP)
        evidence = self._evidence
        reports: dict[SealedProcess, Report] = {}
        processes = self._processes
        with self._steps.backstop(Phase.CLEANUP):
            if why := processes.end(outcome, reports):
                evidence["cleanup"] = why
            for process in reports:
                process.imports.close()  # else its memory would outlive it, and belong to nobody
            if processes.reference is not None:
                processes.reference.free_arena()
        outcome = killed.settle(outcome, reports.values(), alone=self._slot.alone)
        outcome = self._check_device(self._check_memory(self._check_disk(outcome, list(reports.values()))))
        lacks = self._lacks(outcome)
        if self._pytest_run is None and self._settings.examine and lacks is None and examine.is_worthwhile(outcome):
            self._examine()
        if outcome.blame in (Blame.NONE, Blame.CANDIDATE):
            self._processes.begin_next()
        if self._booking is not None:
            self._booking.release()
        if lacks is not None:
            raise _Lacking(lacks)
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
        """Run the kernel once more under the tools that were asked for. Whatever comes of it, the verdict stands."""
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
            self._backend.doubt(self._slot.device, f"a kernel was examined, and since then: {error}")

    def _check_disk(self, outcome: Outcome, reports: list[Report]) -> Outcome:
        """Look whether the host had room for files: if not, and not for the kernel's own, no failure is its fault.

        Sealed processes that have file systems of their own do not need the host's.
        """
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
        """Look whether the GPU is as it was, now that its candidate is gone: if not, nothing that it said counts."""
        nothing_ran = self._processes.candidate is None and self._pytest_run is None
        if not self._slot.on_gpu or nothing_ran or outcome.category is Category.GPU_UNHEALTHY:
            return outcome
        leaked = self._evidence["leaked_bytes"] = self._memory.leak() if self._memory is not None else None
        if leaked:
            reason = f"{leaked} bytes of its memory belong to no process, since an evaluation"
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
        """Have the GPU tested by what it can compute, which takes milliseconds. On a CPU there is nothing to test."""
        if not self._slot.on_gpu:
            return
        self._status_page.enter(Phase.SELF_TEST, time.monotonic() + health.SELF_TEST_S)
        with self._steps.timed("canary"):
            self._evidence["canary"] = health.test()
        self._status_page.enter(Phase.PREPARE)

    @contextlib.contextmanager
    def _reporting_foreign_processes(self) -> Generator[health.Sharing]:
        """Tell in the evidence who else was seen on the GPU, whatever comes of that."""
        try:
            yield self._sharing
        finally:
            if self._slot.on_gpu and self._settings.timing.enabled:
                strangers = self._sharing.strangers
                self._evidence["strangers"] = "unknown" if strangers is None else strangers


def _unless_repeated(ended: EvaluationEnded, how: str) -> EvaluationEnded:
    """A wrong answer on an input that was also answered right; any other failure as it is."""
    outcome = ended.outcome
    if outcome.category not in _ABOUT_VALUES:
        return ended
    return EvaluationEnded(
        Category.NONDETERMINISTIC, f"{how}: {outcome.message}", Phase.CHECK, **outcome.facts.model_dump()
    )
