"""One evaluation, from a claim to an outcome.

Order: what can be settled without a device; the problem is imported; the candidate is forked and opens the
device while the judge makes inputs and runs the reference; only then does any of the kernel's code run, so
that it cannot disturb the reference: import, construction, compilation, checks and timing.
The device is used alone (the slot's lock) for the reference, the checks and the timing; everything else
overlaps with the work of the device's other slots.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import time
from collections.abc import Generator
from functools import cached_property
from typing import Any, Final
from uuid import uuid4

import torch
from sqlalchemy import Engine

from kqueue.broker import GPU_WAIT_S
from kqueue.categories import Blame, Category
from kqueue.config import load
from kqueue.contract import Backend, Measurement, Outcome, Phase, Policy
from kqueue.errors import DatabaseUnavailable
from kqueue.store import baselines, evaluations, gpus
from kqueue.store.evaluations import Claim
from workers.blackbox import BlackBox
from workers.channel.activities import Activity, NotRecorded
from workers.channel.buffers import CudaCallError
from workers.channel.protocol import Job
from workers.gpu import environment
from workers.judge import build, clocks, compare, health, physics, provenance, static, timing, tools
from workers.judge.build import Build
from workers.judge.ending import EvaluationEnded
from workers.judge.problem import Case, Problem
from workers.judge.process import CandidateProcess
from workers.judge.session import Session
from workers.sandbox.launch import ForkServer, ForkServerError
from workers.sandbox.report import Report
from workers.sandbox.seal import Profile
from workers.sandbox.uids import BUILDER_OFFSET, REFERENCE_OFFSET
from workers.slot import Slot

#: Seconds beyond the candidate's own deadline after which the judge itself is ended.
_BACKSTOP_S: Final = 30.0
#: How long the device is waited for only to test it: a verdict is known, and others will test it.
_TEST_WAIT_S: Final = 30.0
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
#: How much the judge's own work inside a call may differ from what it was when a baseline was cached.
_DRIFT: Final = 1.25
#: What a log may not hold where people read it: a terminal or a page would obey it.
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
#: How often a baseline is taken that cannot be told from the null.
_BASELINE_TRIES: Final = 3
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
        self._durations: dict[str, float] = {}
        self._processes: list[CandidateProcess] = []
        self._builder: Build | None = None
        self._reference_left = self._deadlines.reference_s
        self._evidence: dict[str, Any] = {}
        self._problem: Problem
        self._environment_hash = ""
        #: The clock that kernel and reference are timed by.
        self._basis: timing.Basis = "gpu_clock" if slot.on_gpu else "cpu_clock"
        self._reference_blocks = False
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
            with self._backstop(Phase.CLEANUP):
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
        with self._reference_alarm():
            problem = self._problem = Problem(self._request.problem, self._settings, self._device)
        if self._slot.on_gpu:
            self._memory = health.Memory(self._slot.device)
        candidate = self._begin_candidate()
        timed = self._settings.timing.enabled
        known = self._cached(self._basis) if timed else None
        rival = self._begin(self._request.problem, "Model", REFERENCE_OFFSET) if timed and known is None else None
        with self._timed("reference"), self._reference_alarm():
            problem.construct()
            cases = problem.make_cases(self._memory_for(_CASES_SHARE))
            # Its first call loads and chooses kernels: while others may use the device.
            problem.answer(cases[0])
        with self._alone("reference"), self._reference_alarm():
            cases, later, last = self._answer(cases)
        # The comparison's own kernels and buffers are loaded at first use: now, while others may use the device.
        compare.check_values(cases[0].outputs, cases[0], self._settings)
        self._test_device()
        if timed and self._flusher is not None:
            self._flusher()
        if rival is not None:
            self._get_going(rival, cases[0])
        elif known is not None:
            self._basis = known.basis
        self._build(candidate)
        with self._timed("construct"), self._backstop(Phase.CONSTRUCT):
            triton = self._slot.on_gpu and self._request.backend is Backend.TRITON
            candidate.construct(cases[0], rehearse=triton)
        stopwatch = series = baseline = None
        with self._telling_strangers() as sharing, self._timed("wait_for_strangers"):
            sharing.before_timing()
        with self._alone("measure"), self._backstop(Phase.CHECK):
            self._evidence |= self._check(candidate, cases, later)
            if timed:
                stopwatch = self._stopwatch(candidate, self._proofs(cases[0]))
                series = self._time(stopwatch)
                self._check_again(candidate, last)
                self._evidence["floor"] = self._floor(cases[0])
            if series is not None and rival is not None:
                # Not beside a kernel that could disturb it.
                self._look_at_provenance(candidate, cases[0])
                self._stop(candidate)
                baseline = self._time_reference(rival, series.basis)
                rival.process.stop()
        if rival is None:
            with self._backstop(Phase.CHECK):
                self._look_at_provenance(candidate, cases[0])
        self._stop(candidate)
        if stopwatch is not None:
            with self._alone("verify"):
                with self._reference_alarm():
                    self._evidence["verified_calls"] = stopwatch.verify()
                self._test_device()
                self._tested = True
        if self._activities is not None:
            found = provenance.assess(self._activities, self._request.kernel, self._request.backend)
            self._evidence["provenance"] = found
            provenance.enforce(found, self._settings.policies.decoys)
        runtime = None
        if series is not None:
            baseline = baseline or self._baseline_for(series, cases[0])
            null = timing.null_of(series, self._slot, baseline)
            runtime = timing.summarise(series, null, self._settings.timing, self._slot)
            with self._telling_strangers() as sharing:
                sharing.after_timing()
            if self._evidence["floor"]:
                physics.enforce(self._evidence["floor"], runtime)
            if self._settings.timing.compiled_baseline:
                self._evidence["compiled_baseline"] = self._compiled_baseline(series, cases[0])
        return Outcome(
            category=Category.PASSED,
            message=f"right on {len(cases) + later} input sets",
            runtime=runtime,
            baseline=baseline,
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
        with self._timed("build"), self._backstop(Phase.COMPILE):
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
        by_deadline = int(self._reference_left / 2 / self._problem.forward_s)
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
        with self._timed("check"):
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
        with self._reference_alarm():
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
        with self._timed("provenance"):
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

    def _time(self, stopwatch: timing.Stopwatch) -> timing.Series:
        with self._timed("time"):
            return stopwatch.measure(self._settings.timing, basis=self._basis, null_share=_NULL_SHARE)

    def _floor(self, case: Case) -> dict[str, Any]:
        """What memory allows, in figures; empty on a CPU."""
        return physics.floor(self._problem, case, clocks.Flusher().bandwidth()) if self._slot.on_gpu else {}

    def _settings_key(self, basis: timing.Basis, *, compiled: bool = False) -> str:
        """What a baseline depends on beside the problem and the environment."""
        settings = self._settings
        cold = "cold" if settings.timing.cold_l2 else "warm"
        how = "compiled" if compiled else "eager"
        return (
            f"{timing.METHOD} {basis} {how} {settings.precision} seed={settings.seed} {cold}"
            f" calls={settings.timing.calls} precision={settings.timing.precision:g}"
        )

    def _cached(self, basis: timing.Basis, *, compiled: bool = False) -> Measurement | None:
        key = self._settings_key(basis, compiled=compiled)
        return baselines.get(self._engine, self._request.problem_hash, self._environment_hash, key)

    def _get_going(self, rival: Session, case: Case, *, compiled: bool = False) -> None:
        """Construct the reference in its process, make its first calls, and see which clock can time it.

        None of the kernel's code runs meanwhile: it has not been loaded yet, or has been stopped.
        """
        with self._timed("construct_reference"), self._backstop(Phase.CONSTRUCT), _blaming_the_reference():
            rival.construct(case, rehearse=compiled)
        with self._alone("reference"), self._backstop(Phase.CHECK), _blaming_the_reference():
            rival.prepare_calls(case)
            rival.run(case)
            if self._slot.on_gpu and self._stopwatch(rival, 0).blocks():
                self._basis, self._reference_blocks = "cpu_clock", True

    def _time_reference(
        self, rival: Session, basis: timing.Basis, *, compiled: bool = False, known: Measurement | None = None
    ) -> Measurement:
        """Take null and baseline, and keep them. The reference's failures are the problem's.

        What others do on the device can drown a short call: one that cannot be told from the null is taken
        again, a few times, and never kept. Nor is one kept in the place of a known one that still holds.
        """
        with self._timed("baseline"), _blaming_the_reference():
            measurement = self._measure_reference(rival, basis)
            for _ in range(_BASELINE_TRIES - 1):
                if measurement.q1_ms <= 0:
                    measurement = self._measure_reference(rival, basis)
        if known is not None and not _has_drifted(known, measurement.yardstick_ms):
            return known  # it was the kernel that held the judge's work up
        if measurement.q1_ms > 0:
            # Where the reference itself waits for the GPU there is no other clock to time it by.
            keys: set[timing.Basis] = (
                {measurement.basis, "gpu_clock"} if self._reference_blocks else {measurement.basis}
            )
            for key in keys:
                baselines.put(
                    self._engine,
                    self._request.problem_hash,
                    self._environment_hash,
                    self._settings_key(key, compiled=compiled),
                    measurement,
                    replace=known is not None,
                )
        return measurement

    def _measure_reference(self, rival: Session, basis: timing.Basis) -> Measurement:
        series = self._stopwatch(rival, 0).measure(self._settings.timing, basis=basis, null_share=1.0)
        null = timing.null_of(series, self._slot)
        return timing.summarise(series, null, self._settings.timing, self._slot)

    def _baseline_for(self, series: timing.Series, case: Case, *, compiled: bool = False) -> Measurement:
        """The cached baseline, or a new one where there is none by this clock or the device is not what it was."""
        known = self._cached(series.basis, compiled=compiled)
        if known is not None and not _has_drifted(known, series.yardstick_ms):
            return known
        if known is not None:
            self._evidence["baseline_drift"] = {"was_ms": known.yardstick_ms, "is_ms": series.yardstick_ms}
        rival = self._begin(self._request.problem, "Model", REFERENCE_OFFSET, compiled=compiled)
        self._get_going(rival, case, compiled=compiled)
        with self._alone("measure_reference"), self._backstop(Phase.TIME):
            measurement = self._time_reference(rival, series.basis, compiled=compiled, known=known)
        rival.process.stop()
        return measurement

    def _compiled_baseline(self, series: timing.Series, case: Case) -> dict[str, Any]:
        """The reference's time under ``torch.compile``; what is wrong with it is told and fails nothing else."""
        try:
            return self._baseline_for(series, case, compiled=True).model_dump(mode="json")
        except EvaluationEnded as ended:
            return {"error": ended.outcome.message}

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
        with self._backstop(Phase.CLEANUP):
            for process in self._processes:
                try:
                    reports.append(process.stop())
                except ForkServerError as error:
                    # What is known of the kernel stays true; a right answer whose end is unknown does not.
                    if outcome.category.blame is Blame.NONE:
                        raise
                    evidence["cleanup"] = str(error)
        outcome = self._check_device(self._check_disk(outcome, reports))
        evidence["durations_s"] = {name: round(value, 6) for name, value in self._durations.items()}
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
            with self._device_soon() as had:
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
        with self._timed("canary"):
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

    @contextlib.contextmanager
    def _device_soon(self) -> Generator[bool]:
        """Have the device alone, if it is free before long."""
        with self._lock() as lock:
            deadline = time.monotonic() + _TEST_WAIT_S
            had = False
            with self._timed("wait_for_device"):
                while not had and time.monotonic() < deadline:
                    try:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        had = True
                    except BlockingIOError:
                        time.sleep(0.005)
            yield had

    @contextlib.contextmanager
    def _lock(self) -> Generator[int]:
        lock = os.open(self._slot.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield lock
        finally:
            os.close(lock)

    @contextlib.contextmanager
    def _alone(self, what: str) -> Generator[None]:
        """Have the device alone among its slots."""
        self._blackbox.enter(Phase.PREPARE)
        with self._lock() as lock:
            with self._timed("wait_for_device"), _alarm(GPU_WAIT_S):
                fcntl.flock(lock, fcntl.LOCK_EX)
            with self._timed(f"alone_{what}"):
                yield

    @contextlib.contextmanager
    def _timed(self, name: str) -> Generator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            self._durations[name] = self._durations.get(name, 0.0) + time.monotonic() - begun

    @contextlib.contextmanager
    def _reference_alarm(self) -> Generator[None]:
        """The problem's code runs: the process ends when its time is up, and its parent records why."""
        left = self._reference_left
        self._blackbox.enter(Phase.REFERENCE, time.monotonic() + left)
        begun = time.monotonic()
        with _alarm(left):
            yield
        self._reference_left = max(left - (time.monotonic() - begun), 0.001)
        self._blackbox.enter(Phase.PREPARE)

    @contextlib.contextmanager
    def _backstop(self, phase: Phase) -> Generator[None]:
        """Should every deadline below fail, the judge itself ends: its parent records ``judge_error``."""
        self._blackbox.enter(phase)
        with _alarm(self._deadlines.total_s + _BACKSTOP_S):
            yield


def _size(case: Case) -> int:
    """Bytes of an answered case."""
    return sum(tensor.nbytes for tensor in (*case.inputs, *case.outputs))


def _has_drifted(known: Measurement, now: float | None) -> bool:
    """Whether the device is another than when the baseline was taken, by the judge's own work in the calls."""
    then = known.yardstick_ms
    return then is not None and now is not None and not 1 / _DRIFT < then / now < _DRIFT


@contextlib.contextmanager
def _blaming_the_reference() -> Generator[None]:
    """What fails in the process that runs the reference is the problem's, not the kernel's."""
    try:
        yield
    except EvaluationEnded as ended:
        if ended.outcome.blame is Blame.FLEET:
            raise
        raise EvaluationEnded(
            Category.REFERENCE_ERROR,
            f"the reference failed in a process of its own: {ended.outcome.message}",
            ended.outcome.phase,
            **ended.outcome.facts,
        ) from None


@contextlib.contextmanager
def _alarm(seconds: float) -> Generator[None]:
    """End this process, whatever it executes, unless the block is left within ``seconds``.

    Within another such block that one's time goes on when this one is left.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel's own doing: a handler would wait for Python
    begun = time.monotonic()
    outer, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        left = max(outer - (time.monotonic() - begun), 0.001) if outer else 0
        signal.setitimer(signal.ITIMER_REAL, left)


def _unless_repeated(ended: EvaluationEnded, how: str) -> EvaluationEnded:
    """A wrong answer on an input that was also answered right; any other failure as it is."""
    outcome = ended.outcome
    if outcome.category not in _ABOUT_VALUES:
        return ended
    return EvaluationEnded(Category.NONDETERMINISTIC, f"{how}: {outcome.message}", Phase.CHECK, **outcome.facts)
