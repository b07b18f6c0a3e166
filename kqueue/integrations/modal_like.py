"""An evaluator with the interface of evaluators on Modal, backed by a kqueue fleet.

::

    set_modal_evaluator(ModalKernelEvaluator(ModalEvaluatorConfig(gpu_type="H200")))
    results = await get_modal_evaluator().evaluate_batch([{"ref_code": ..., "kernel_code": ...}, ...])

``docs/evaluator.md`` explains what each argument means here.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from kqueue.categories import Category
from kqueue.client import AsyncClient
from kqueue.contract import Request, Verdict
from kqueue.errors import ConfigError, EvaluationFailed, InvalidRequest
from kqueue.integrations.connection import Connection
from kqueue.integrations.lanes import lane_of
from kqueue.kernelbench import request_of, result_of

if TYPE_CHECKING:
    from kqueue.integrations.local import LocalKernelEvaluator

_log = logging.getLogger(__name__)

#: KernelBench's timing methods. All are accepted, and none changes how the judge takes times.
TIMING_METHODS: Final = ("cuda_event", "host_time", "do_bench", "do_bench_impl")
#: Categories of a source that cannot be a kernel at all.
_NO_KERNEL: Final = frozenset({Category.SYNTAX_ERROR, Category.ENTRY_POINT_MISSING})


@dataclass
class ModalEvaluatorConfig:
    """Settings of :class:`ModalKernelEvaluator`.

    Attributes:
        enabled: if False, every evaluation raises :class:`~kqueue.errors.ConfigError`.
        gpu_type: the GPU's model, such as ``A100`` or ``L40S``; see :func:`lane_of`.
        timeout: limit of each phase of an evaluation in seconds, without the wait for a GPU.
        max_batch_size: most calls of ``evaluate_single_batched`` to send together.
        return_exceptions: True if ``evaluate_batch`` returns exceptions in their entries' places; False if it raises
            the first.
        batch_single: True if ``evaluate_single_batched`` waits for other calls to send together.
        batch_window_s: seconds that it waits.
        deployment_mode: ``deployed`` uses the fleet that the settings name or that runs on this machine;
            ``ephemeral`` starts one on this machine if none runs, and stops it after ten idle minutes.
        wait_for_gpu: accept a GPU type that no worker has now, and wait for one.
        max_queue_wait_s: most seconds that an evaluation waits for a worker; None for no limit.
    """

    enabled: bool = True
    gpu_type: str = "A100"
    timeout: float = 120
    max_batch_size: int = 32
    return_exceptions: bool = True
    batch_single: bool = True
    batch_window_s: float = 0.15
    deployment_mode: Literal["deployed", "ephemeral"] = "deployed"
    wait_for_gpu: bool = False
    max_queue_wait_s: float | None = None

    def __post_init__(self) -> None:
        """Validate the fields.

        Raises:
            ConfigError: a field is wrong; the message names it.
        """
        if self.deployment_mode not in ("deployed", "ephemeral"):
            raise ConfigError(f"deployment_mode: {self.deployment_mode!r} is neither deployed nor ephemeral")
        if self.max_batch_size < 1:
            raise ConfigError(f"max_batch_size: must be at least 1, not {self.max_batch_size}")
        if self.batch_window_s < 0:
            raise ConfigError(f"batch_window_s: must be 0 or more seconds, not {self.batch_window_s}")


class ModalKernelEvaluator:
    """Evaluate kernels on a fleet. Threads and event loops may share it."""

    def __init__(self, config: ModalEvaluatorConfig | None = None, client: AsyncClient | None = None) -> None:
        """Configure an evaluator. The first evaluation connects.

        Args:
            config: the settings.
            client: the client to use, which the caller closes; for a fleet behind HTTP an
                :class:`~kqueue.AsyncRemoteClient`. By default an :class:`~kqueue.AsyncClient` from the environment's
                settings.
        """
        self.config = config or ModalEvaluatorConfig()
        self._given = client
        self._own = Connection(AsyncClient)
        self._local: LocalKernelEvaluator | None = None
        self._lock = threading.Lock()
        self._batchers = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Batcher]()

    async def evaluate_single(
        self,
        ref_code: str,
        kernel_code: str,
        backend: str = "triton",
        num_correct_trials: int = 5,
        measure_performance: bool = False,
        num_perf_trials: int = 100,
        precision: str = "fp32",
        timing_method: str = "cuda_event",
        check_for_excessive_speedup: bool = True,
        excessive_speedup_threshold: float = 10.0,
    ) -> dict[str, Any]:
        """Evaluate one kernel.

        Args:
            ref_code: source of the reference.
            kernel_code: source of the kernel.
            backend: ``cuda``, ``triton``, ``torch``, ``cpp`` or ``cupy``.
            num_correct_trials: input sets to check.
            measure_performance: True to time the kernel.
            num_perf_trials: most timed calls.
            precision: ``fp32``, ``fp16`` or ``bf16``.
            timing_method: one of :data:`TIMING_METHODS`, for compatibility. The judge always takes times its own way;
                ``metadata["timing_basis"]`` names it.
            check_for_excessive_speedup: True to flag an implausible speedup in ``metadata["excessive_speedup"]``.
            excessive_speedup_threshold: speedups above this are implausible.

        Returns:
            ``format_ok`` (the source is Python and names ``ModelNew``), ``compiled``, ``correctness``,
            ``tests_passed`` (all or 0: the judge stops at the first failure), ``tests_total``, ``speedup``,
            ``runtime_ms``, ``baseline_runtime_ms`` (medians in milliseconds), ``error_message``, ``code_length``
            (characters), ``metadata`` (see :func:`~kqueue.kernelbench.result_of`). Unknown values are None.

        Raises:
            InvalidRequest: an argument is wrong.
            LaneUnavailable: no worker has such a GPU, unless ``wait_for_gpu``.
            EvaluationFailed: the fleet or the problem failed; nothing is known about the kernel.
            ConfigError, ServiceError: evaluation is disabled, or there is no fleet.
        """
        results = await self._evaluate(
            [
                {
                    "ref_code": ref_code,
                    "kernel_code": kernel_code,
                    "backend": backend,
                    "num_correct_trials": num_correct_trials,
                    "measure_performance": measure_performance,
                    "num_perf_trials": num_perf_trials,
                    "precision": precision,
                    "timing_method": timing_method,
                    "check_for_excessive_speedup": check_for_excessive_speedup,
                    "excessive_speedup_threshold": excessive_speedup_threshold,
                }
            ]
        )
        return _raised(results)[0]

    async def evaluate_batch(self, evaluations: Sequence[Mapping[str, Any]]) -> list[dict[str, Any] | Exception]:
        """Evaluate many kernels at once.

        Args:
            evaluations: for each kernel the arguments of :meth:`evaluate_single` by name.

        Returns:
            the results in order. With ``return_exceptions`` a failed entry has the exception that
            :meth:`evaluate_single` would have raised.

        Raises:
            ConfigError, ServiceError: as :meth:`evaluate_single`; nothing was evaluated.
        """
        results = await self._evaluate(evaluations)
        return results if self.config.return_exceptions else [*_raised(results)]

    async def evaluate_single_batched(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Do as :meth:`evaluate_single`, but send the calls of ``batch_window_s`` seconds together."""
        arguments = _SIGNATURE.bind(self, *args, **kwargs)
        arguments.apply_defaults()
        if not self.config.batch_single:
            return await self.evaluate_single(*arguments.args[1:], **arguments.kwargs)
        loop = asyncio.get_running_loop()
        with self._lock:
            batcher = self._batchers.setdefault(loop, _Batcher(self))
        return await batcher.submit({name: value for name, value in arguments.arguments.items() if name != "self"})

    async def close(self) -> None:
        """Close the connections that this evaluator opened, and stop the fleet that it started."""
        with self._lock:
            local, self._local = self._local, None
        if (own := self._own.take()) is not None:
            await own.close()
        if local is not None:
            await asyncio.to_thread(local.close)

    async def _evaluate(self, evaluations: Iterable[Mapping[str, Any]]) -> list[dict[str, Any] | Exception]:
        if not self.config.enabled:
            raise ConfigError("evaluation is disabled: set enabled=True in ModalEvaluatorConfig")
        orders = [self._order(each) for each in evaluations]
        requests = [order.request for order in orders if isinstance(order, _Order)]
        found = iter(await self._judge(requests) if requests else [])
        return [_result(order, next(found)) if isinstance(order, _Order) else order for order in orders]

    async def _judge(self, requests: list[Request]) -> Sequence[Verdict | InvalidRequest]:
        if self._given is None and self.config.deployment_mode == "ephemeral":
            return await asyncio.to_thread(
                self._local_evaluator().judge, requests, allow_idle_lane=self.config.wait_for_gpu
            )
        client = self._given or self._own.client()
        return await client.evaluate_batch(requests, allow_idle_lane=self.config.wait_for_gpu)

    def _local_evaluator(self) -> LocalKernelEvaluator:
        from kqueue.integrations.local import LocalKernelEvaluator

        with self._lock:
            if self._local is None:
                self._local = LocalKernelEvaluator(gpu=self.config.gpu_type)
            return self._local

    def _order(self, evaluation: Mapping[str, Any]) -> _Order | Exception:
        try:
            arguments = _SIGNATURE.bind(self, **evaluation)
        except TypeError as error:
            return InvalidRequest(f"evaluation: {error}; the arguments are those of evaluate_single")
        arguments.apply_defaults()
        given = arguments.arguments
        try:
            if given["timing_method"] not in TIMING_METHODS:
                known = ", ".join(TIMING_METHODS)
                raise InvalidRequest(f"timing_method: {given['timing_method']!r} is not known; use one of {known}")
            request = request_of(
                given["ref_code"],
                given["kernel_code"],
                backend=given["backend"],
                num_correct_trials=given["num_correct_trials"],
                num_perf_trials=given["num_perf_trials"],
                measure_performance=given["measure_performance"],
                precision=given["precision"],
                timeout_s=self.config.timeout,
                lane=lane_of(self.config.gpu_type),
                queue_wait_s=self.config.max_queue_wait_s,
            )
        except InvalidRequest as error:
            return error
        return _Order(request, given)


@dataclass(frozen=True, slots=True)
class _Order:
    """A request and the arguments from which it was built."""

    request: Request
    arguments: Mapping[str, Any]


class _Batcher:
    """Collects the calls of one event loop. It needs no lock: nothing awaits between a check and its use."""

    def __init__(self, evaluator: ModalKernelEvaluator) -> None:
        self._evaluator = evaluator
        self._pending: list[tuple[Mapping[str, Any], asyncio.Future[dict[str, Any]]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = set[asyncio.Task[None]]()

    async def submit(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._pending.append((arguments, future))
        if len(self._pending) >= self._evaluator.config.max_batch_size:
            self._flush()
        elif self._timer is None:
            self._timer = loop.call_later(self._evaluator.config.batch_window_s, self._flush)
        return await future

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch, self._pending = self._pending, []
        # The event loop holds only weak references to tasks.
        task = asyncio.get_running_loop().create_task(self._run(batch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, batch: list[tuple[Mapping[str, Any], asyncio.Future[dict[str, Any]]]]) -> None:
        results: Sequence[dict[str, Any] | Exception]
        try:
            results = await self._evaluator._evaluate([arguments for arguments, _ in batch])  # pyright: ignore[reportPrivateUsage]
        except Exception as error:  # noqa: BLE001 each caller gets it
            results = [error] * len(batch)
        for result, (_, future) in zip(results, batch, strict=True):
            if future.done():
                continue  # its caller was cancelled
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)


def _raised(results: Iterable[dict[str, Any] | Exception]) -> list[dict[str, Any]]:
    good: list[dict[str, Any]] = []
    for result in results:
        if isinstance(result, Exception):
            raise result
        good.append(result)
    return good


def _result(order: _Order, verdict: Verdict | InvalidRequest) -> dict[str, Any] | Exception:
    if isinstance(verdict, InvalidRequest):
        return verdict
    if not verdict.judged:
        return EvaluationFailed(verdict)
    asked = order.arguments
    metadata = result_of(verdict)["metadata"] | {"timing_method": asked["timing_method"]}
    threshold = asked["excessive_speedup_threshold"]
    if asked["check_for_excessive_speedup"] and verdict.speedup is not None and verdict.speedup > threshold:
        _log.warning(
            "a speedup of %.3g is above %.3g: evaluation %s", verdict.speedup, threshold, verdict.evaluation_id
        )
        metadata["excessive_speedup"] = True
    return {
        "format_ok": verdict.category not in _NO_KERNEL,
        "compiled": bool(verdict.compiled),
        "correctness": verdict.passed,
        "tests_passed": asked["num_correct_trials"] if verdict.passed else 0,
        "tests_total": asked["num_correct_trials"],
        "speedup": verdict.speedup,
        "runtime_ms": verdict.runtime_ms,
        "baseline_runtime_ms": verdict.baseline_ms,
        "error_message": None if verdict.passed else f"{verdict.category}: {verdict.message}",
        "code_length": len(order.request.kernel),
        "metadata": metadata,
    }


_SIGNATURE: Final = inspect.signature(ModalKernelEvaluator.evaluate_single)
_global_lock: Final = threading.Lock()
_global: ModalKernelEvaluator | None = None


def get_modal_evaluator(config: ModalEvaluatorConfig | None = None) -> ModalKernelEvaluator:
    """Return the process's evaluator, creating it on first use. A ``config`` replaces its settings from now on."""
    global _global
    with _global_lock:
        if _global is None:
            _global = ModalKernelEvaluator(config)
        elif config is not None:
            _global.config = config
        return _global


def set_modal_evaluator(evaluator: ModalKernelEvaluator | None) -> None:
    """Set the process's evaluator. None makes :func:`get_modal_evaluator` create a new one."""
    global _global
    with _global_lock:
        _global = evaluator
