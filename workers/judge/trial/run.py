"""One evaluation, from a claim to an outcome.

Order: what can be settled without a device; the problem is imported; the candidate is forked and opens the
device while the judge makes inputs and runs the reference; only then does any of the kernel's code run, so
that it cannot disturb the reference: import, construction, compilation, checks and timing.
The device is used alone (the slot's lock) for the reference, the checks and the timing; everything else
overlaps with the work of the device's other slots.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Generator
from functools import cached_property, partial
from typing import Any, Final
from uuid import uuid4

import torch
from sqlalchemy import Engine

from kqueue.categories import Blame, Category
from kqueue.config import load
from kqueue.contract import Backend, Outcome, Phase, Policy
from kqueue.errors import DatabaseUnavailable
from kqueue.store import evaluations, gpus
from kqueue.store.evaluations import Claim
from workers.judge.channel.activities import Activity, NotRecorded
from workers.judge.channel.buffers import CudaCallError
from workers.judge.channel.protocol import Job
from workers.judge.gpu import environment
from workers.judge.host.blackbox import BlackBox
from workers.judge.host.uids import BUILDER_OFFSET, REFERENCE_OFFSET
from workers.judge.keeper.handle import ForkServer, ForkServerError
from workers.judge.keeper.process import CandidateProcess
from workers.judge.keeper.report import Report
from workers.judge.sandbox.seal import Profile
from workers.judge.trial import build, clocks, compare, health, physics, provenance, static, timing, tools
from workers.judge.trial.baseline import Baseline
from workers.judge.trial.build import Build
from workers.judge.trial.ending import EvaluationEnded
from workers.judge.trial.problem import Case, Problem
from workers.judge.trial.session import Session
from workers.judge.trial.steps import Steps
from workers.slot import Slot

#: A candidate's own nulls, as a share of its calls.
_NULL_SHARE: Final = 0.2
#: How many timed calls are verified: as many as the reference answers in this time (in seconds), but not few for
#: that alone, and as fit into this memory.
_MOST_PROOFS: Final = 16
_SLOW_PROOFS: Final = 8
_FEWEST_PROOFS: Final = 2
_PROOFS_S: Final = 0.05
#: The shares of a GPU's memory, divided by its slots, for them and for the inputs of all cases to check; and what
#: either may take of a host's.
_PROOFS_SHARE: Final = 0.2
_CASES_SHARE: Final = 0.2
_HOST_BYTES: Final = 2 << 30
#: What a candidate's own CUDA context and kernels take of a GPU's memory, generously, in bytes.
_SLACK_BYTES: Final = 2 << 30
#: What a log may not hold where people read it: a terminal or a page would obey it.
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
#: Categories that another run on the same input can overturn.
_ABOUT_VALUES: Final = frozenset({Category.WRONG_VALUES, Category.NOT_FINITE})
#: Whoever fails where the disk has less room than this besides its own files may have failed for that, in bytes.
_ROOM_BYTES: Final = 64 << 20
#: The share of a GPU's memory that all its slots' candidates may take together.
_MEMORY_SHARE: Final = 0.9


def evaluate(claim: Claim, slot: Slot, blackbox: BlackBox, forkserver: ForkServer, engine: Engine) -> Outcome:
    """Judge a claimed evaluation.

    Returns:
        its outcome: the candidate's, the problem's, or ``gpu_unhealthy``.

    Raises:
        Exception: the judge itself failed; nothing is known of the kernel.
    """
    return _Evaluation(claim, slot, blackbox, forkserver, engine).run()


class _Evaluation:
    def __init__(self, claim: Claim, slot: Slot, blackbox: BlackBox, forkserver: ForkServer, engine: Engine) -> None:
        self._claim = claim
        self._request = claim.request
        self._settings = claim.request.settings
        self._deadlines = claim.request.settings.deadlines
        self._slot = slot
        self._blackbox = blackbox
        self._forkserver = forkserver
        self._engine = engine
        self._device = "cuda" if slot.on_gpu else "cpu"
        self._processes: list[CandidateProcess] = []
        self._builder: Build | None = None
        self._steps = Steps(blackbox, slot, self._deadlines)
        self._evidence: dict[str, Any] = {}
        self._problem: Problem
        self._environment_hash = ""
        self._watch = environment.Watch(slot)
        self._activities: list[Activity] | None = None
        self._memory: health.Memory | None = None
        timed_on_gpu = slot.on_gpu and self._settings.timing.enabled
        self._sharing = health.Sharing(slot.device if timed_on_gpu else None, load().gpu_shared)
        self._tested = False

    def run(self) -> Outcome:
        """See :func:`evaluate`."""
        try:
            with self._watch:
                outcome = self._judge()
        except EvaluationEnded as ended:
            outcome = ended.outcome
        except (torch.OutOfMemoryError, torch.AcceleratorError, CudaCallError) as error:
            # The candidate has a context of its own: an error in the judge's is the device's.
            with self._steps.backstop(Phase.CLEANUP):
                hog = self._memory_hog()
            outcome = hog or Outcome(
                category=Category.GPU_UNHEALTHY,
                message=f"the judge's own work on the GPU failed: {type(error).__name__}: {error}",
                facts={"cuda_code": getattr(error, "error_code", None)},
            )
        return self._clean_up(outcome)

    def _memory_hog(self) -> Outcome | None:
        """What comes of a kernel that holds more of the GPU's memory than it was given; None if it does not."""
        try:
            for process in self._processes[1:]:
                process.stop()
            before, total = torch.cuda.mem_get_info()
            self._processes[0].stop()
            held = torch.cuda.mem_get_info()[0] - before
        except (torch.AcceleratorError, CudaCallError, ForkServerError, IndexError):
            return None
        allowed = int(total * _MEMORY_SHARE / self._slot.siblings)
        if held <= allowed + _SLACK_BYTES:
            return None
        return Outcome(
            category=Category.GPU_OUT_OF_MEMORY,
            message=f"the kernel held {held} bytes of the GPU's memory, of which {allowed} are its share",
            phase=Phase.CHECK,
            facts={"held_bytes": held, "allowed_bytes": allowed},
        )

    def _judge(self) -> Outcome:
        self._blackbox.enter(Phase.PREPARE)
        self._read_source()
        tools.require(self._request.backend)
        self._environment_hash = evaluations.set_environment(
            self._engine, self._claim.attempt_id, environment.facts(self._slot)
        )
        with self._steps.reference_alarm():
            problem = self._problem = Problem(self._request.problem, self._settings, self._device)
        if self._slot.on_gpu:
            self._memory = health.Memory(self._slot.device)
        candidate = self._begin_candidate()
        timed = self._settings.timing.enabled
        baseline = self._baseline() if timed else None
        if baseline is not None:
            baseline.begin()
        with self._steps.timed("reference"), self._steps.reference_alarm():
            problem.construct()
            cases = problem.make_cases(self._memory_for(_CASES_SHARE))
            # Its first call loads and chooses kernels: while others may use the device.
            problem.answer(cases[0])
        with self._steps.alone("reference"), self._steps.reference_alarm():
            cases, later, last = self._answer(cases)
        # The comparison's own kernels and buffers are loaded at first use: now, while others may use the device.
        compare.check_values(cases[0].outputs, cases[0], self._settings)
        self._test_device()
        if timed and self._flusher is not None:
            self._flusher()
        if baseline is not None:
            baseline.get_going(cases[0])
        self._build(candidate)
        with self._steps.timed("construct"), self._steps.backstop(Phase.CONSTRUCT):
            triton = self._slot.on_gpu and self._request.backend is Backend.TRITON
            candidate.construct(cases[0], rehearse=triton)
        stopwatch = series = None
        with self._telling_strangers() as sharing, self._steps.timed("wait_for_strangers"):
            sharing.before_timing()
        with self._steps.alone("measure"), self._steps.backstop(Phase.CHECK):
            self._evidence |= self._check(candidate, cases, later)
            if baseline is not None:
                stopwatch = self._stopwatch(candidate, self._proofs(cases[0]))
                series = self._time(stopwatch, baseline.basis)
                self._check_again(candidate, last)
                self._evidence["floor"] = self._floor(cases[0])
                if baseline.known is None:
                    # Not beside a kernel that could disturb it.
                    self._look_at_provenance(candidate, cases[0])
                    self._stop(candidate)
                    baseline.take(series.basis)
        if baseline is None or baseline.known is not None:
            with self._steps.backstop(Phase.CHECK):
                self._look_at_provenance(candidate, cases[0])
        self._stop(candidate)
        if stopwatch is not None:
            with self._steps.alone("verify"):
                with self._steps.reference_alarm():
                    self._evidence["verified_calls"] = stopwatch.verify()
                self._test_device()
                self._tested = True
        if self._activities is not None:
            found = provenance.assess(self._activities, self._request.kernel, self._request.backend)
            self._evidence["provenance"] = found
            provenance.enforce(found, self._settings.policies.decoys)
        runtime = reference = None
        if baseline is not None and series is not None:
            reference = baseline.baseline_for(series, cases[0])
            null = timing.null_of(series, self._slot, reference)
            runtime = timing.summarise(series, null, self._settings.timing, self._slot)
            with self._telling_strangers() as sharing:
                sharing.after_timing()
            if self._evidence["floor"]:
                physics.enforce(self._evidence["floor"], runtime)
            if self._settings.timing.compiled_baseline:
                self._evidence["compiled_baseline"] = baseline.compiled_baseline(series, cases[0])
        return Outcome(
            category=Category.PASSED,
            message=f"right on {len(cases) + later} input sets",
            runtime=runtime,
            baseline=reference,
        )

    def _read_source(self) -> None:
        """What can be said of the kernel by reading it."""
        source, policy = self._request.kernel, self._settings.policies.findings
        static.check(source)
        if policy is not Policy.ALLOW:
            findings = static.findings(source, self._request.backend)
            self._evidence["findings"] = findings
            static.enforce(findings, policy)

    @cached_property
    def _flusher(self) -> clocks.Flusher | None:
        return clocks.Flusher() if self._slot.on_gpu else None

    def _profile(self, uid_offset: int, built: str | None, *, builder: bool = False) -> Profile:
        limits, uid = self._settings.limits, self._slot.uid
        return Profile(
            uid=uid + uid_offset if uid is not None else None,
            scratch=str(self._slot.scratch / uuid4().hex),
            processes=limits.processes,
            file_bytes=limits.file_bytes,
            host_memory_bytes=limits.host_memory_bytes,
            output_bytes=limits.output_bytes,
            scratch_bytes=limits.scratch_bytes,
            builder=builder,
            built=built,
        )

    def _begin_candidate(self) -> Session:
        """Fork the candidate, and where its source is compiled when it is imported, the process that does that."""
        kernel = self._request.kernel
        if self._request.backend not in build.BACKENDS:
            return self._begin(kernel, static.ENTRY)
        built = str(self._slot.scratch / uuid4().hex)
        candidate = self._begin(kernel, static.ENTRY, built=built)
        profile = self._profile(BUILDER_OFFSET, built, builder=True)
        self._builder = Build(self._forkserver, profile, self._deadlines, kernel, on_gpu=self._slot.on_gpu)
        self._processes.append(self._builder.process)
        return candidate

    def _build(self, candidate: Session) -> None:
        """Have compiled what the candidate is going to import."""
        if self._builder is None:
            return
        with self._steps.timed("build"), self._steps.backstop(Phase.COMPILE):
            found = self._evidence["build"] = self._builder.run()
        if "skipped" not in found:  # else the candidate may have to compile it all
            candidate.process.charge_compilers(found["seconds"])

    def _begin(
        self, source: str, entry: str, uid_offset: int = 0, *, compiled: bool = False, built: str | None = None
    ) -> Session:
        """Fork a process for ``source`` and have it get ready, without waiting."""
        profile = self._profile(uid_offset, built)
        process = CandidateProcess(self._forkserver, profile, self._deadlines.compile_s)
        self._processes.append(process)
        session = Session(process, self._problem)
        session.begin(
            Job(
                source=source,
                entry=entry,
                device=self._device,
                dtype=self._problem.dtype,
                seed=self._settings.seed,
                init_inputs=self._problem.init_inputs,
                memory_fraction=_MEMORY_SHARE / self._slot.siblings,
                compiled=compiled,
                built=built or "",
            )
        )
        return session

    def _answer(self, cases: list[Case]) -> tuple[list[Case], int, Case | None]:
        """Have the reference answer the cases to check, and one for after the timing.

        Where they would take too much of the GPU's memory together there is only the first: the others are made and
        answered one by one, when they are checked.

        Returns:
            the cases to check now, how many of the problem's own are left for later, and the one for after.
        """
        if len(cases) < self._settings.checks:
            return cases, self._settings.checks - 1, None
        answered = [cases[0], *(case for case in cases[1:] if self._problem.answer(case))]
        if not self._settings.timing.enabled:
            return answered, 0, None
        last = self._problem.fresh()
        self._problem.answer(last)
        return answered, 0, last

    def _proofs(self, case: Case) -> int:
        """How many timed calls are verified: as the reference's speed and memory for their values allow."""
        by_time = max(int(_PROOFS_S / self._problem.forward_s), _SLOW_PROOFS)
        by_deadline = int(self._steps.reference_left / 2 / self._problem.forward_s)
        by_memory = int(self._memory_for(_PROOFS_SHARE) // max(_size(case), 1))
        most = _MOST_PROOFS if self._slot.on_gpu else _SLOW_PROOFS
        return max(_FEWEST_PROOFS, min(most, by_time, by_deadline, by_memory))

    def _memory_for(self, share: float) -> float:
        """Bytes of the device that this evaluation may spend on something."""
        if not self._slot.on_gpu:
            return _HOST_BYTES
        return share * torch.cuda.get_device_properties(0).total_memory / self._slot.siblings

    def _check(self, candidate: Session, cases: list[Case], later: int) -> dict[str, Any]:
        """All checked calls: every case once, and the first one again."""
        with self._steps.timed("check"):
            candidate.prepare_calls(cases[0])
            figures = [self._check_case(candidate, case) for case in cases]
            for _ in range(later):
                figures.append(self._check_case(candidate, self._answered()))
            try:
                candidate.run(cases[0])
            except EvaluationEnded as ended:
                raise _unless_repeated(ended, "right at first, wrong when the same input was run again") from None
        return {
            "checks": len(cases) + later,
            "comparison": compare.merge_errors(figures),
            "reference_is_constant": self._problem.reference_is_constant,
        }

    def _answered(self) -> Case:
        """One more case with its answer."""
        with self._steps.reference_alarm():
            case = self._problem.fresh()
            self._problem.answer(case)
        self._blackbox.enter(Phase.CHECK)
        return case

    def _check_again(self, candidate: Session, case: Case | None) -> None:
        """One more checked call, on an input that it has not seen, when timing is over."""
        candidate.process.enter(Phase.CHECK, self._deadlines.check_s)
        try:
            candidate.run(case or self._answered())
        except EvaluationEnded as ended:
            raise _unless_repeated(ended, "right before it was timed, wrong after") from None

    def _check_case(self, candidate: Session, case: Case) -> dict[str, Any]:
        try:
            return candidate.run(case)
        except EvaluationEnded as ended:
            if ended.outcome.category not in _ABOUT_VALUES:
                raise
            first = ended
        try:
            candidate.run(case)
        except EvaluationEnded:
            raise first from None
        raise _unless_repeated(first, "wrong at first, right when the same input was run again")

    def _look_at_provenance(self, candidate: Session, case: Case) -> None:
        """Ask the candidate whose kernels do its work. It is only asked when all else is known."""
        if not self._slot.on_gpu or self._settings.policies.decoys is Policy.ALLOW:
            return
        with self._steps.timed("provenance"):
            try:
                self._activities = candidate.profile(case)
            except NotRecorded as error:
                self._evidence["provenance_error"] = str(error)
            except EvaluationEnded as ended:
                self._evidence["provenance_error"] = str(ended)
                if self._settings.policies.decoys is Policy.REJECT:
                    raise  # one that dies rather than be looked at

    def _stopwatch(self, session: Session, proofs: int) -> timing.Stopwatch:
        seconds = self._deadlines.time_s
        session.process.enter(Phase.TIME, seconds)
        return timing.Stopwatch(session, self._problem, self._slot, seconds, self._flusher, self._watch, proofs)

    def _time(self, stopwatch: timing.Stopwatch, basis: timing.Basis) -> timing.Series:
        with self._steps.timed("time"):
            return stopwatch.measure(self._settings.timing, basis=basis, null_share=_NULL_SHARE)

    def _baseline(self) -> Baseline:
        return Baseline(
            self._request,
            self._slot,
            self._engine,
            self._environment_hash,
            self._steps,
            begin=partial(self._begin, self._request.problem, "Model", REFERENCE_OFFSET),
            stopwatch=partial(self._stopwatch, proofs=0),
            evidence=self._evidence,
        )

    def _floor(self, case: Case) -> dict[str, Any]:
        """What memory allows, in figures; empty on a CPU."""
        return physics.floor(self._problem, case, clocks.Flusher().bandwidth()) if self._slot.on_gpu else {}

    def _stop(self, candidate: Session) -> None:
        """End a candidate that has done all that was asked, and look at what it leaves."""
        self._blackbox.enter(Phase.CLEANUP)
        # One that has not survived being profiled has done all that counts.
        profiled_to_death = candidate.process.ended is not None
        report = candidate.process.stop()
        if report.reason != "stopped" and not profiled_to_death:
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
        self._blackbox.enter(Phase.CLEANUP)
        evidence = self._evidence
        reports: list[Report] = []
        with self._steps.backstop(Phase.CLEANUP):
            for process in self._processes:
                try:
                    reports.append(process.stop())
                except ForkServerError as error:
                    # What is known of the kernel stays true; a right answer whose end is unknown does not.
                    if outcome.category.blame is Blame.NONE:
                        raise
                    evidence["cleanup"] = str(error)
        outcome = self._check_device(self._check_disk(outcome, reports))
        evidence["durations_s"] = {name: round(value, 6) for name, value in self._steps.durations.items()}
        evidence["isolation"] = self._forkserver.isolation
        evidence["slots_on_device"] = self._slot.siblings
        log = ""
        if reports:
            built = self._builder.log if self._builder is not None else ""
            log = _CONTROL.sub("\ufffd", built + reports[0].log)
            evidence |= {"peak_bytes": reports[0].peak_bytes, "output_bytes": reports[0].output_bytes}
        return outcome.model_copy(update={"log": log, "evidence": evidence})

    def _check_disk(self, outcome: Outcome, reports: list[Report]) -> Outcome:
        """Look whether the host had room for files: if not, and not for the kernel's own, no failure is its fault."""
        if outcome.blame not in (Blame.CANDIDATE, Blame.PROBLEM):
            return outcome
        disk = os.statvfs(self._slot.scratch)
        room = disk.f_bavail * disk.f_frsize + sum(report.scratch_bytes for report in reports)
        if room >= _ROOM_BYTES:
            return outcome
        return Outcome(
            category=Category.JUDGE_ERROR,
            message=f"the disk of {self._slot.scratch} is full",
            phase=outcome.phase,
            facts={"room_bytes": room, "instead_of": outcome.category},
        )

    def _check_device(self, outcome: Outcome) -> Outcome:
        """Look whether the GPU is as it was, now that its candidate is gone: if not, nothing that it said counts."""
        if not self._slot.on_gpu or not self._processes or outcome.category is Category.GPU_UNHEALTHY:
            return outcome
        leaked = self._evidence["leaked_bytes"] = self._memory.leak() if self._memory is not None else None
        if leaked:
            reason = f"{leaked} bytes of its memory belong to no process, since an evaluation"
            with contextlib.suppress(DatabaseUnavailable):
                gpus.ask_for_test(self._engine, self._slot.device, reason=reason, failed=True)
        # A reference may have spoilt the judge's own context, which then tells nothing of the GPU.
        if self._tested or outcome.blame is Blame.PROBLEM:
            return outcome
        try:
            with self._steps.device_soon() as had:
                if had:
                    self._test_device()
                else:
                    self._evidence["canary"] = "not asked: the device was in use"
        except EvaluationEnded as ended:
            failed = ended.outcome
            return failed.model_copy(update={"facts": {**failed.facts, "instead_of": outcome.category}})
        return outcome

    def _test_device(self) -> None:
        """Have the GPU tested by what it can compute: it counts when the candidate is gone and the device had alone.

        On a CPU there is nothing to test. Done before, too, it loads its kernels while others may use the device.
        """
        if not self._slot.on_gpu:
            return
        self._blackbox.enter(Phase.CANARY, time.monotonic() + health.CANARY_S)
        with self._steps.timed("canary"):
            self._evidence["canary"] = health.test()
        self._blackbox.enter(Phase.PREPARE)

    @contextlib.contextmanager
    def _telling_strangers(self) -> Generator[health.Sharing]:
        """Tell in the evidence who else was seen on the GPU, whatever comes of that."""
        try:
            yield self._sharing
        finally:
            if self._slot.on_gpu and self._settings.timing.enabled:
                strangers = self._sharing.strangers
                self._evidence["strangers"] = "unknown" if strangers is None else strangers


def _size(case: Case) -> int:
    """Bytes of an answered case."""
    return sum(tensor.nbytes for tensor in (*case.inputs, *case.outputs))


def _unless_repeated(ended: EvaluationEnded, how: str) -> EvaluationEnded:
    """A wrong answer on an input that was also answered right; any other failure as it is."""
    outcome = ended.outcome
    if outcome.category not in _ABOUT_VALUES:
        return ended
    return EvaluationEnded(Category.NONDETERMINISTIC, f"{how}: {outcome.message}", Phase.CHECK, **outcome.facts)
