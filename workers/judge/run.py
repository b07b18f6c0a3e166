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
from typing import Any, Final
from uuid import uuid4

import torch
from sqlalchemy import Engine

from kqueue.broker import GPU_WAIT_S
from kqueue.categories import Blame, Category
from kqueue.contract import Backend, Measurement, Outcome, Phase
from kqueue.store import baselines, evaluations
from kqueue.store.evaluations import Claim
from workers.blackbox import BlackBox
from workers.channel.buffers import CudaCallError
from workers.channel.protocol import Job
from workers.gpu import environment
from workers.judge import compare, static, timing, tools
from workers.judge.ending import EvaluationEnded
from workers.judge.problem import GIVEN, Case, Problem
from workers.judge.process import CandidateProcess
from workers.judge.session import Session
from workers.sandbox.launch import ForkServer, ForkServerError
from workers.sandbox.report import Report
from workers.sandbox.seal import Profile
from workers.sandbox.uids import REFERENCE_OFFSET
from workers.slot import Slot

#: Seconds beyond the candidate's own deadline after which the judge itself is ended.
_BACKSTOP_S: Final = 30.0
#: A candidate's own null is taken beside every so many of its calls.
_NULL_EVERY: Final = 4
#: What a log may not hold where people read it: a terminal or a page would obey it.
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
#: How often a baseline is taken that cannot be told from the null.
_BASELINE_TRIES: Final = 3
#: Categories that another run on the same input can overturn.
_ABOUT_VALUES: Final = frozenset({Category.WRONG_VALUES, Category.NOT_FINITE})
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
        self._reference_left = self._deadlines.reference_s

    def run(self) -> Outcome:
        """See :func:`evaluate`."""
        try:
            outcome = self._judge()
        except EvaluationEnded as ended:
            outcome = ended.outcome
        except (torch.OutOfMemoryError, torch.AcceleratorError, CudaCallError) as error:
            # The candidate has a context of its own: an error in the judge's is the device's.
            outcome = Outcome(
                category=Category.GPU_UNHEALTHY,
                message=f"the judge's own work on the GPU failed: {type(error).__name__}: {error}",
                facts={"cuda_code": getattr(error, "error_code", None)},
            )
        return self._clean_up(outcome)

    def _judge(self) -> Outcome:
        self._blackbox.enter(Phase.PREPARE)
        static.check(self._request.kernel)
        tools.require(self._request.backend)
        environment_hash = evaluations.set_environment(
            self._engine, self._claim.attempt_id, environment.facts(self._slot)
        )
        with self._reference_alarm():
            problem = Problem(self._request.problem, self._settings, self._device)
        candidate = self._begin(self._request.kernel, static.ENTRY, problem)
        baseline, rival = self._baseline_or_rival(problem, environment_hash)
        with self._timed("reference"), self._reference_alarm():
            problem.construct()
            cases = problem.make_cases()
        with self._alone("reference"), self._reference_alarm():
            cases = [case for case in cases if problem.answer(case)]
        # The comparison's own kernels are loaded at its first use: now, while others may use the device.
        compare.check_values(cases[0].outputs, cases[0], self._settings)
        with self._timed("construct"), self._backstop(Phase.CONSTRUCT):
            triton = self._slot.on_gpu and self._request.backend is Backend.TRITON
            candidate.construct(cases[0], rehearse=triton)
            if rival is not None:
                with _blaming_the_reference():
                    rival.construct(cases[0], rehearse=False)
        with self._alone("measure"), self._backstop(Phase.CHECK):
            evidence = self._check(candidate, cases)
            clock, samples, nulls = self._time(candidate, cases) if self._settings.timing.enabled else (None, [], [])
            if rival is not None:
                self._stop(candidate)
                baseline = self._time_reference(rival, cases, environment_hash)
        self._stop(candidate)
        if clock is not None:
            clock.verify()
        runtime = None
        if samples and baseline is not None:
            null = min(baseline.null_ms * 1e6, timing.null_of(nulls, self._slot))
            runtime = timing.summarise(samples, null, self._settings.timing, self._slot)
        return Outcome(
            category=Category.PASSED,
            message=f"right on {len(cases)} input sets",
            runtime=runtime,
            baseline=baseline,
            evidence=evidence,
        )

    def _begin(self, source: str, entry: str, problem: Problem, uid_offset: int = 0) -> Session:
        """Fork a process for ``source`` and have it get ready, without waiting."""
        limits, uid = self._settings.limits, self._slot.uid
        profile = Profile(
            uid=uid + uid_offset if uid is not None else None,
            scratch=str(self._slot.scratch / uuid4().hex),
            processes=limits.processes,
            file_bytes=limits.file_bytes,
            host_memory_bytes=limits.host_memory_bytes,
            output_bytes=limits.output_bytes,
        )
        process = CandidateProcess(self._forkserver, profile, self._deadlines.compile_s)
        self._processes.append(process)
        session = Session(process, problem)
        session.begin(
            Job(
                source=source,
                entry=entry,
                device=self._device,
                dtype=problem.dtype,
                seed=self._settings.seed,
                init_inputs=problem.init_inputs,
                memory_fraction=_MEMORY_SHARE / self._slot.siblings,
            )
        )
        return session

    def _baseline_or_rival(self, problem: Problem, environment_hash: str) -> tuple[Measurement | None, Session | None]:
        """The reference's time if it is known here, else a process in which to take it."""
        if not self._settings.timing.enabled:
            return None, None
        known = baselines.get(self._engine, self._request.problem_hash, environment_hash, self._settings_key)
        if known is not None:
            return known, None
        rival = self._begin(self._request.problem, "Model", problem, REFERENCE_OFFSET)
        return None, rival

    @property
    def _settings_key(self) -> str:
        """What a baseline depends on beside the problem and the environment."""
        settings = self._settings
        cold = "cold" if settings.timing.cold_l2 else "warm"
        return f"{timing.METHOD} {settings.precision} seed={settings.seed} {cold} calls={settings.timing.calls}"

    def _check(self, candidate: Session, cases: list[Case]) -> dict[str, Any]:
        """All checked calls: every case once, and the first one again."""
        with self._timed("check"):
            candidate.prepare_calls(cases[0])
            errors = [self._check_case(candidate, case) for case in cases]
            try:
                candidate.run(cases[0])
            except EvaluationEnded as ended:
                raise _unless_repeated(ended, "right at first, wrong when the same input was run again") from None
        return {"checks": len(cases), **compare.merge_errors(errors)}

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

    def _time(self, session: Session, cases: list[Case]) -> tuple[timing.Clock, list[int], list[int]]:
        with self._timed("time"):
            session.process.enter(Phase.TIME, self._deadlines.time_s)
            clock = self._clock(session, cases)
            samples, nulls = clock.measure(self._settings.timing, null_every=_NULL_EVERY)
        return clock, samples, nulls

    def _time_reference(self, rival: Session, cases: list[Case], environment_hash: str) -> Measurement:
        """Take null and baseline, and keep them. The reference's failures are the problem's.

        What others do on the device can drown a short call: one that cannot be told from the null is taken
        again, a few times, and never kept.
        """
        with self._timed("baseline"), _blaming_the_reference():
            rival.prepare_calls(cases[0])
            rival.run(cases[0])
            measurement = self._measure_reference(rival, cases)
            tries = 1
            while measurement.q1_ms <= 0 and tries < _BASELINE_TRIES:
                measurement = self._measure_reference(rival, cases)
                tries += 1
        if measurement.q1_ms > 0:
            baselines.put(self._engine, self._request.problem_hash, environment_hash, self._settings_key, measurement)
        return measurement

    def _measure_reference(self, rival: Session, cases: list[Case]) -> Measurement:
        rival.process.enter(Phase.TIME, 2 * self._deadlines.time_s)
        clock = self._clock(rival, cases)
        samples, nulls = clock.measure(self._settings.timing, null_every=1)
        clock.verify()
        null = timing.null_of(nulls, self._slot)
        return timing.summarise(samples, null, self._settings.timing, self._slot)

    def _clock(self, session: Session, cases: list[Case]) -> timing.Clock:
        given = [case for case in cases if case.kind == GIVEN]
        return timing.Clock(session, given, self._slot, self._deadlines.time_s)

    def _stop(self, candidate: Session) -> None:
        """End a candidate that has done all that was asked, and look at what it leaves."""
        self._blackbox.enter(Phase.CLEANUP)
        report = candidate.process.stop()
        if report.reason != "stopped":
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
        evidence = dict(outcome.evidence)
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
        evidence["durations_s"] = {name: round(value, 6) for name, value in self._durations.items()}
        evidence["isolation"] = self._forkserver.isolation
        evidence["slots_on_device"] = self._slot.siblings
        log = ""
        if reports:
            log = _CONTROL.sub("\ufffd", reports[0].log)
            evidence |= {"peak_bytes": reports[0].peak_bytes, "output_bytes": reports[0].output_bytes}
        return outcome.model_copy(update={"log": log, "evidence": evidence})

    @contextlib.contextmanager
    def _alone(self, what: str) -> Generator[None]:
        """Have the device alone among its slots."""
        self._blackbox.enter(Phase.PREPARE)
        lock = os.open(self._slot.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with self._timed("wait_for_device"), _alarm(GPU_WAIT_S):
                fcntl.flock(lock, fcntl.LOCK_EX)
            with self._timed(f"alone_{what}"):
                yield
        finally:
            os.close(lock)

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


@contextlib.contextmanager
def _blaming_the_reference() -> Generator[None]:
    """What fails in the process that runs the reference is the problem's, not the kernel's."""
    try:
        yield
    except EvaluationEnded as ended:
        raise EvaluationEnded(
            Category.REFERENCE_ERROR,
            f"the reference failed in a process of its own: {ended.outcome.message}",
            ended.outcome.phase,
            **ended.outcome.facts,
        ) from None


@contextlib.contextmanager
def _alarm(seconds: float) -> Generator[None]:
    """End this process, whatever it executes, unless the block is left within ``seconds``."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel's own doing: a handler would wait for Python
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _unless_repeated(ended: EvaluationEnded, how: str) -> EvaluationEnded:
    """A wrong answer on an input that was also answered right; any other failure as it is."""
    outcome = ended.outcome
    if outcome.category not in _ABOUT_VALUES:
        return ended
    return EvaluationEnded(Category.NONDETERMINISTIC, f"{how}: {outcome.message}", Phase.CHECK, **outcome.facts)
