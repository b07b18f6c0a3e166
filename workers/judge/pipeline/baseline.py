"""The reference's own time: taken in its sealed process, kept in the records, taken anew where it drifted.

Of one evaluation: :meth:`Baseline.get_going` before any of the kernel's code runs; :meth:`Baseline.take` when the
kernel is gone and the device still had alone; :meth:`Baseline.baseline_for` when the kernel's times are known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from kqueue.contract import Phase, Request
from kqueue.evidence import Measurement
from workers.judge.backend import JudgeBackend
from workers.judge.channel.protocol import Job, Order
from workers.judge.ending import EvaluationEnded
from workers.judge.pipeline import timing
from workers.judge.pipeline.blame import blaming
from workers.judge.pipeline.cases import Case
from workers.judge.pipeline.exchange import Exchange
from workers.judge.pipeline.reference import Reference
from workers.judge.pipeline.steps import Steps
from workers.judge.slot_config import SlotConfig

#: How much the judge's own work inside a call may differ from what it was when a baseline was cached.
_DRIFT: Final = 1.25
#: How often a baseline is taken that cannot be told from the null.
_TRIES: Final = 3
_WHAT: Final = "the reference, when it was timed,"


class Baseline:
    """The reference's time, for one evaluation.

    Attributes:
        known: the baseline as it was cached when the evaluation began; None where there was none.
        basis: the clock that kernel and reference are timed by.
    """

    def __init__(
        self,
        request: Request,
        slot: SlotConfig,
        backend: JudgeBackend,
        environment_hash: str,
        steps: Steps,
        reference: Reference,
        *,
        begin_compiled: Callable[[], Exchange],
        stopwatch: Callable[[Exchange], timing.Stopwatch],
        evidence: dict[str, Any],
    ) -> None:
        """Look the baseline up.

        Args:
            request: what is evaluated.
            slot: where.
            backend: where baselines are kept.
            environment_hash: what numbers depend on here.
            steps: the evaluation's.
            reference: the process to time.
            begin_compiled: makes another process ready that runs the reference under ``torch.compile``.
            stopwatch: times a process, none of whose calls is verified.
            evidence: told of a drift.
        """
        self._request = request
        self._settings = request.settings
        self._slot = slot
        self._backend = backend
        self._environment_hash = environment_hash
        self._steps = steps
        self._reference = reference
        self._begin_compiled = begin_compiled
        self._stopwatch = stopwatch
        self._evidence = evidence
        self.basis: timing.Basis = "gpu_clock" if slot.on_gpu else "cpu_clock"
        self.known: Measurement | None = self._cached(self.basis)
        self._reference_blocks = False
        self._taken: Measurement | None = None

    def get_going(self) -> None:
        """See which clock can time the reference. None of the kernel's code may run meanwhile."""
        if self.known is not None:
            self.basis = self.known.basis
        elif self._slot.on_gpu:
            with (
                self._steps.alone("reference"),
                self._steps.backstop(Phase.CHECK),
                self._blaming(self._reference.exchange),
                self._reference.timed() as exchange,
            ):
                if self._stopwatch(exchange).blocks():
                    self.basis, self._reference_blocks = "cpu_clock", True

    def take(self, basis: timing.Basis) -> None:
        """Take the baseline by the kernel's clock. The device is had alone, and the kernel has been ended."""
        with self._reference.timed() as exchange:
            self._taken = self._time_reference(exchange, basis)

    def baseline_for(self, series: timing.Series) -> Measurement:
        """Return the baseline that was taken, else the cached one, else a new one.

        A new one is taken where there is none by the series' clock, or the device is not what it was.

        Raises:
            EvaluationEnded: the reference failed.
        """
        return self._taken or self._baseline_for(series, compiled=False)

    def compiled_baseline(self, series: timing.Series) -> dict[str, Any]:
        """Return the reference's time under ``torch.compile``; its failure is told and fails nothing else."""
        try:
            return self._baseline_for(series, compiled=True).model_dump(mode="json")
        except EvaluationEnded as ended:
            return {"error": ended.outcome.message}

    def _settings_key(self, basis: timing.Basis, *, compiled: bool = False) -> str:
        """Return what a baseline depends on beside the problem and the environment."""
        settings = self._settings
        cold = "cold" if settings.timing.cold_l2 else "warm"
        how = "compiled" if compiled else "eager"
        precision = settings.precision + "+float64" * settings.keeps_float64 + "+tf32" * settings.tf32
        return (
            f"{timing.METHOD} {basis} {how} {precision} seed={settings.seed} {cold}"
            f" calls={settings.timing.calls} precision={settings.timing.precision:g}"
        )

    def _cached(self, basis: timing.Basis, *, compiled: bool = False) -> Measurement | None:
        key = self._settings_key(basis, compiled=compiled)
        return self._backend.baseline(self._request.problem_hash, self._environment_hash, key)

    def _time_reference(
        self, exchange: Exchange, basis: timing.Basis, *, compiled: bool = False, known: Measurement | None = None
    ) -> Measurement:
        """Take null and baseline, and keep them. The reference's failures are the problem's.

        The work of others on the device can drown a short call: one that cannot be told from the null is taken
        again, a few times, and never kept. Nor is one kept instead of a known one that still holds.
        """
        with self._steps.timed("baseline"), self._blaming(exchange):
            measurement = self._measure_reference(exchange, basis)
            for _ in range(_TRIES - 1):
                if measurement.q1_ms <= 0:
                    measurement = self._measure_reference(exchange, basis)
        if known is not None and not _has_drifted(known, measurement.yardstick_ms):
            return known  # it was the kernel that held the judge's work up
        if measurement.q1_ms > 0:
            # Where the reference itself waits for the GPU there is no other clock to time it by.
            keys: set[timing.Basis] = (
                {measurement.basis, "gpu_clock"} if self._reference_blocks else {measurement.basis}
            )
            for key in keys:
                self._backend.keep_baseline(
                    self._request.problem_hash,
                    self._environment_hash,
                    self._settings_key(key, compiled=compiled),
                    measurement,
                    replace=known is not None,
                )
        return measurement

    def _blaming(self, exchange: Exchange) -> contextlib.AbstractContextManager[None]:
        return blaming(_WHAT, exchange.process, self._reference.allowed_bytes)

    def _measure_reference(self, exchange: Exchange, basis: timing.Basis) -> Measurement:
        series = self._stopwatch(exchange).measure(self._settings.timing, basis=basis, overhead_share=1.0)
        null = timing.overhead_of(series, self._slot)
        return timing.summarise(series, null, self._settings.timing, self._slot)

    def _baseline_for(self, series: timing.Series, *, compiled: bool) -> Measurement:
        """Return the cached baseline, or a new one where there is none by this clock or the device has changed."""
        known = self._cached(series.basis, compiled=compiled)
        if known is not None and not _has_drifted(known, series.yardstick_ms):
            return known
        if known is not None:
            self._evidence["baseline_drift"] = {"was_ms": known.yardstick_ms, "is_ms": series.yardstick_ms}
        if not compiled:
            with (
                self._steps.alone("measure_reference"),
                self._steps.backstop(Phase.TIME),
                self._reference.timed() as exchange,
            ):
                return self._time_reference(exchange, series.basis, known=known)
        exchange = self._begin_compiled()
        with self._steps.alone("measure_reference"), self._steps.backstop(Phase.TIME):
            measurement = self._time_reference(exchange, series.basis, compiled=True, known=known)
        exchange.process.stop()
        return measurement


def begin_compiled(exchange: Exchange, job: Job, reference: Reference, case: Case, steps: Steps) -> None:
    """Make a process ready that runs the reference under ``torch.compile``.

    Raises:
        EvaluationEnded: the reference failed.
    """
    deadlines = reference.settings.deadlines
    process = exchange.process
    blamed = partial(blaming, _WHAT, process, reference.allowed_bytes)
    with steps.timed("construct_reference"), steps.backstop(Phase.CONSTRUCT), blamed():
        process.enter(Phase.LOAD, deadlines.load_s)
        process.order(Order.LOAD, payload=job)
        process.enter(Phase.CONSTRUCT, deadlines.construct_s)
        process.order(Order.CONSTRUCT, payload=reference.init_inputs)
        exchange.bind_inputs(case.inputs)
        process.enter(Phase.COMPILE, deadlines.compile_s)
        process.order(Order.WARM_UP)
    with steps.untimed("reference"), steps.backstop(Phase.CHECK), blamed():
        process.enter(Phase.CHECK, deadlines.check_s)
        exchange.bind_outputs(reference.output_specs)
        exchange.outputs(process.order(Order.RUN, seed=case.seed))


def _has_drifted(known: Measurement, now: float | None) -> bool:
    """Return whether the device is another than when the baseline was taken, by the judge's own work in the calls."""
    then = known.yardstick_ms
    return then is not None and now is not None and not 1 / _DRIFT < then / now < _DRIFT
