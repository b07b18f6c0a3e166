"""The reference's own time, measured in its sealed process in turn with the kernel, and without the kernel.

Times in turn with the kernel meet the same clocks, temperature and neighbours, so they are the better baseline. But a
kernel could slow down the reference meanwhile. So such a time counts only if it agrees with one that was taken while
the kernel did not run: an earlier one, which is cached, or one that is taken when the kernel is gone.

During one evaluation, :meth:`Baseline.choose_clock` runs before any of the kernel's code, :meth:`Baseline.beside` while
the kernel is timed, and :meth:`Baseline.settle` when the kernel is gone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Final

from kqueue.contract import Phase
from kqueue.evidence import BaselineError, Drift, Measurement
from workers.judge.channel.orders import Order
from workers.judge.ending import EvaluationEnded
from workers.judge.pipeline import estimator, timing
from workers.judge.pipeline.blame import blaming
from workers.judge.pipeline.context import Context
from workers.judge.pipeline.estimator import Basis, Series
from workers.judge.pipeline.exchange import Exchange
from workers.judge.pipeline.reference import Reference

#: Number of measurements of a baseline that is no longer than the launch overhead.
_TRIES: Final = 3
_WHAT: Final = "the reference, when it was timed,"


class Baseline:
    """The reference's time in one evaluation.

    Attributes:
        basis: the clock that times kernel and reference.
    """

    def __init__(self, context: Context, reference: Reference, recall: Callable[[], Reference]) -> None:
        """Prepare for one shape. ``recall`` returns its reference again after other shapes have used the process."""
        assert context.instruments is not None
        self._context = context
        self._settings = context.settings
        self._slot = context.slot
        self._backend = context.backend
        self._steps = context.steps
        self._problem_hash = context.problem_hash
        self._shape = "" if context.shape is None else f" shape={context.shape.name}"
        self._shape += "" if context.pass_ is None else f" pass={context.pass_}"
        self._environment_hash = context.environment_hash
        self._reference, self._recall = reference, recall
        self._instruments = context.instruments
        # A seed must not arrive before the clock starts, and the GPU's clock times work that was enqueued earlier.
        self.basis: Basis = "gpu_clock" if context.slot.on_gpu and not reference.form.draws else "cpu_clock"
        self._reference_blocks = False

    def choose_clock(self) -> None:
        """Choose the clock that can time the reference. None of the kernel's code must run meanwhile."""
        # A baseline in turn with a kernel whose own clock counted is by the reference's own clock.
        if (known := self._cached(self.basis, fine=True) or self._cached(self.basis)) is not None:
            self.basis = known.basis
        elif self.basis == "gpu_clock":
            with (
                self._steps.alone("reference"),
                self._steps.backstop(Phase.CHECK),
                self._blaming(self._reference.proxy.exchange),
                self._reference.timed() as exchange,
            ):
                if self._stopwatch(exchange).blocks():
                    self.basis, self._reference_blocks = "cpu_clock", True

    def beside(self, exchange: Exchange) -> timing.Beside:
        """Return the reference for timing in turn with the kernel. ``exchange`` is its process."""
        return timing.Beside(exchange, lambda: self._blaming(exchange))

    def settle(self, series: Series, beside: Series | None, *, fine: bool) -> Measurement:
        """Return the baseline of a kernel that has ended. Measure the reference again if that is needed.

        Args:
            series: the kernel's times.
            beside: the reference's times in turn with the kernel, if there are any.
            fine: True if the kernel's own clock counts, so that the reference's must count too.

        Raises:
            EvaluationEnded: the reference failed.
        """
        if beside is None or beside.basis != series.basis:
            self._context.evidence.baseline_taken = "without_kernel"
            return self._baseline_for(series, compiled=False)
        measured = self.summarise(beside, fine=fine)
        cached = self._cached(beside.basis, fine=fine)
        if cached is not None and estimator.is_shorter(measured, cached):
            self._keep(cached := measured, measured.basis, replace=True)
        elif cached is None or estimator.is_longer(measured, cached):
            cached = self._take(beside.basis, fine=fine)
        is_slowed = cached.is_fine == fine and estimator.is_longer(measured, cached)
        self._context.evidence.baseline_taken = "without_kernel" if is_slowed else "in_turn"
        return cached if is_slowed else measured

    def _take(self, basis: Basis, *, fine: bool = False) -> Measurement:
        """Measure the reference without the kernel, and cache the result."""
        self._reference, steps = self._recall(), self._steps
        with steps.alone("measure_reference"), steps.backstop(Phase.TIME), self._reference.timed() as exchange:
            return self._time_reference(exchange, basis, replace=True, fine=fine)

    def compiled_baseline(self, series: Series) -> Measurement | BaselineError:
        """Return the reference's time under ``torch.compile``, or its error, which has no other consequence."""
        try:
            return self._baseline_for(series, compiled=True)
        except EvaluationEnded as ended:
            return BaselineError(error=ended.outcome.message)

    def _settings_key(self, basis: Basis, *, compiled: bool = False, fine: bool = False) -> str:
        """Return the key for all settings that a baseline depends on."""
        settings = self._settings
        cold = "cold" if settings.timing.cold_l2 else "warm"
        how = ("compiled" if compiled else "eager") + " own" * fine
        precision = settings.precision + "+float64" * settings.keeps_float64 + "+tf32" * settings.tf32
        return (
            f"{timing.METHOD} {basis} {how} {precision} seed={settings.seed} {cold}"
            f" calls={settings.timing.calls} purpose={settings.timing.purpose}{self._shape}"
        )

    def _cached(self, basis: Basis, *, compiled: bool = False, fine: bool = False) -> Measurement | None:
        key = self._settings_key(basis, compiled=compiled, fine=fine)
        return self._backend.baseline(self._problem_hash, self._environment_hash, key)

    def _keep(self, measurement: Measurement, basis: Basis, *, compiled: bool = False, replace: bool) -> None:
        key = self._settings_key(basis, compiled=compiled, fine=measurement.is_fine)
        self._backend.keep_baseline(self._problem_hash, self._environment_hash, key, measurement, replace=replace)

    def _time_reference(
        self, exchange: Exchange, basis: Basis, *, compiled: bool = False, replace: bool = False, fine: bool = False
    ) -> Measurement:
        """Measure the launch overhead and the baseline, and cache it. The problem is blamed for failures."""
        # Other processes' work on the device can hide a short call. One that is not longer than the launch overhead is
        # measured again, a few times, and never cached.
        with self._steps.timed("baseline"), self._blaming(exchange):
            measurement = self._measure_reference(exchange, basis, fine=fine)
            for _ in range(_TRIES - 1):
                if measurement.q1_ms <= 0:
                    measurement = self._measure_reference(exchange, basis, fine=fine)
        if measurement.q1_ms > 0:
            # If the reference itself waits for the GPU, no other clock can time it.
            keys: set[Basis] = {measurement.basis, "gpu_clock"} if self._reference_blocks else {measurement.basis}
            for key in keys:
                self._keep(measurement, key, compiled=compiled, replace=replace)
        return measurement

    def _blaming(self, exchange: Exchange) -> contextlib.AbstractContextManager[None]:
        proxy = self._reference.proxy
        return blaming(_WHAT, exchange.process, proxy.settings.deadlines.reference_s, proxy.allowed_bytes)

    def _measure_reference(self, exchange: Exchange, basis: Basis, *, fine: bool) -> Measurement:
        series, _ = self._stopwatch(exchange).measure(self._settings.timing, basis=basis)
        return self.summarise(series, fine=fine)

    def summarise(self, series: Series, *, fine: bool = True) -> Measurement:
        """Return the measurement of a reference's series. See :func:`.estimator.summarise`."""
        overhead = estimator.overhead_of(series, on_gpu=(on_gpu := self._slot.on_gpu))
        return estimator.summarise(series, overhead, self._settings.timing, on_gpu=on_gpu, fine=fine)

    def _baseline_for(self, series: Series, *, compiled: bool) -> Measurement:
        """Return the cached baseline, or a new one if there is none by this clock or the device has drifted."""
        cached = self._cached(series.basis, compiled=compiled)
        if cached is not None and not estimator.has_drifted(cached, series.yardstick_ms):
            return cached
        if cached is not None:
            assert cached.yardstick_ms is not None
            assert series.yardstick_ms is not None
            self._context.evidence.baseline_drift = Drift(was_ms=cached.yardstick_ms, is_ms=series.yardstick_ms)
        if not compiled:
            taken = self._take(series.basis)
            # The kernel can have slowed down the judge's work. Then the cached baseline is still right.
            is_right = cached is not None and not estimator.has_drifted(cached, taken.yardstick_ms)
            return cached if cached is not None and is_right else taken
        exchange = self._begin_compiled()
        with self._steps.alone("measure_reference"), self._steps.backstop(Phase.TIME):
            measurement = self._time_reference(exchange, series.basis, compiled=True, replace=cached is not None)
        exchange.process.stop()
        return measurement

    def _begin_compiled(self) -> Exchange:
        """Prepare a process that runs the reference under ``torch.compile``."""
        self._reference = self._recall()
        steps, reference, deadlines = self._steps, self._reference, self._settings.deadlines
        exchange, job = self._context.processes.begin_compiled()
        case, process = reference.cache.fresh(), exchange.process
        with steps.timed("construct_reference"), steps.backstop(Phase.CONSTRUCT), self._blaming(exchange):
            process.enter(Phase.LOAD, deadlines.load_s)
            process.order(Order.LOAD, payload=job)
            process.enter(Phase.CONSTRUCT, deadlines.construct_s)
            process.order(Order.CONSTRUCT, payload=reference.proxy.init_inputs)
            exchange.set_up(case.inputs)
            exchange.bind_inputs(case.inputs)
            process.enter(Phase.COMPILE, deadlines.compile_s)
            process.order(Order.WARM_UP)
        with steps.untimed("reference"), steps.backstop(Phase.CHECK), self._blaming(exchange):
            process.enter(Phase.CHECK, deadlines.check_s)
            exchange.bind_outputs(reference.form.output_specs)
            exchange.outputs(process.order(Order.RUN, seed=case.seed))
        return exchange

    def _stopwatch(self, exchange: Exchange) -> timing.Stopwatch:
        """Return a stopwatch for a process, none of whose calls is verified."""
        return timing.Stopwatch(exchange, self._reference, self._slot, self._instruments)
