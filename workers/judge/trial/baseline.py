"""The reference's own time: taken in a sealed process of its own, kept in the database, taken anew where it drifted.

Of one evaluation: :meth:`Baseline.begin` early, so that a process that is needed gets ready meanwhile;
:meth:`Baseline.get_going` before any of the kernel's code runs; :meth:`Baseline.take` when the kernel is gone and
the device still had alone; :meth:`Baseline.baseline_for` when the kernel's times are known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any, Final, Protocol

from sqlalchemy import Engine

from kqueue.categories import Blame, Category
from kqueue.contract import Measurement, Phase, Request
from kqueue.store import baselines
from workers.judge.trial import timing
from workers.judge.trial.ending import EvaluationEnded
from workers.judge.trial.problem import Case
from workers.judge.trial.session import Session
from workers.judge.trial.steps import Steps
from workers.slot import Slot

#: How much the judge's own work inside a call may differ from what it was when a baseline was cached.
_DRIFT: Final = 1.25
#: How often a baseline is taken that cannot be told from the null.
_TRIES: Final = 3


class _Begin(Protocol):
    def __call__(self, *, compiled: bool) -> Session: ...


class Baseline:
    """What the reference takes, for one evaluation.

    Attributes:
        known: the baseline as it was cached when the evaluation began; None where there was none.
        basis: the clock that kernel and reference are timed by.
    """

    def __init__(
        self,
        request: Request,
        slot: Slot,
        engine: Engine,
        environment_hash: str,
        steps: Steps,
        *,
        begin: _Begin,
        stopwatch: Callable[[Session], timing.Stopwatch],
        evidence: dict[str, Any],
    ) -> None:
        """Nothing is asked or started yet.

        Args:
            request: what is evaluated.
            slot: where it runs.
            engine: the database, where baselines are kept.
            environment_hash: what numbers depend on here.
            steps: the evaluation's.
            begin: forks a process for the reference, which gets ready without being waited for.
            stopwatch: what times such a process, none of whose calls is verified.
            evidence: told of a drift.
        """
        self._request = request
        self._settings = request.settings
        self._slot = slot
        self._engine = engine
        self._environment_hash = environment_hash
        self._steps = steps
        self._begin = begin
        self._stopwatch = stopwatch
        self._evidence = evidence
        self.known: Measurement | None = None
        self.basis: timing.Basis = "gpu_clock" if slot.on_gpu else "cpu_clock"
        self._reference_blocks = False
        self._rival: Session | None = None
        self._taken: Measurement | None = None

    def begin(self) -> None:
        """Look the baseline up; where it is not known, fork the process that it is taken from."""
        self.known = self._cached(self.basis)
        if self.known is None:
            self._rival = self._begin(compiled=False)

    def get_going(self, case: Case) -> None:
        """Have the reference's process, if there is one, ready to be timed, and see which clock is to time it.

        None of the kernel's code may run meanwhile: it has not been loaded yet.
        """
        if self._rival is not None:
            self._get_going(self._rival, case)
        elif self.known is not None:
            self.basis = self.known.basis

    def take(self, basis: timing.Basis) -> None:
        """Take the baseline from the process that is ready, by the kernel's clock, and end that process.

        The device is had alone, and the kernel has been ended.
        """
        assert self._rival is not None
        self._taken = self._time_reference(self._rival, basis)
        self._rival.process.stop()

    def baseline_for(self, series: timing.Series, case: Case) -> Measurement:
        """The baseline that was taken, else the cached one, else a new one.

        A new one is taken where there is none by the series' clock, or the device is not what it was.

        Raises:
            EvaluationEnded: the reference failed in its own process.
        """
        return self._taken or self._baseline_for(series, case, compiled=False)

    def compiled_baseline(self, series: timing.Series, case: Case) -> dict[str, Any]:
        """The reference's time under ``torch.compile``; what is wrong with it is told and fails nothing else."""
        try:
            return self._baseline_for(series, case, compiled=True).model_dump(mode="json")
        except EvaluationEnded as ended:
            return {"error": ended.outcome.message}

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
        steps = self._steps
        with steps.timed("construct_reference"), steps.backstop(Phase.CONSTRUCT), _blaming_the_reference():
            rival.construct(case, rehearse=compiled)
        with steps.alone("reference"), steps.backstop(Phase.CHECK), _blaming_the_reference():
            rival.prepare_calls(case)
            rival.run(case)
            if self._slot.on_gpu and self._stopwatch(rival).blocks():
                self.basis, self._reference_blocks = "cpu_clock", True

    def _time_reference(
        self, rival: Session, basis: timing.Basis, *, compiled: bool = False, known: Measurement | None = None
    ) -> Measurement:
        """Take null and baseline, and keep them. The reference's failures are the problem's.

        What others do on the device can drown a short call: one that cannot be told from the null is taken
        again, a few times, and never kept. Nor is one kept in the place of a known one that still holds.
        """
        with self._steps.timed("baseline"), _blaming_the_reference():
            measurement = self._measure_reference(rival, basis)
            for _ in range(_TRIES - 1):
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
        series = self._stopwatch(rival).measure(self._settings.timing, basis=basis, null_share=1.0)
        null = timing.null_of(series, self._slot)
        return timing.summarise(series, null, self._settings.timing, self._slot)

    def _baseline_for(self, series: timing.Series, case: Case, *, compiled: bool) -> Measurement:
        """The cached baseline, or a new one where there is none by this clock or the device is not what it was."""
        known = self._cached(series.basis, compiled=compiled)
        if known is not None and not _has_drifted(known, series.yardstick_ms):
            return known
        if known is not None:
            self._evidence["baseline_drift"] = {"was_ms": known.yardstick_ms, "is_ms": series.yardstick_ms}
        rival = self._begin(compiled=compiled)
        self._get_going(rival, case, compiled=compiled)
        with self._steps.alone("measure_reference"), self._steps.backstop(Phase.TIME):
            measurement = self._time_reference(rival, series.basis, compiled=compiled, known=known)
        rival.process.stop()
        return measurement


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
