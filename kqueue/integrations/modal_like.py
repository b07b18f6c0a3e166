"""An evaluator with the interface of evaluators on Modal, backed by a kqueue fleet.

::

    set_modal_evaluator(ModalKernelEvaluator(ModalEvaluatorConfig(gpu_type="H200")))
    results = await get_modal_evaluator().evaluate_batch([{"ref_code": ..., "kernel_code": ...}, ...])

``docs/evaluators.md`` explains the meaning of each argument.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal, Self, cast

from kqueue.client import AsyncClient
from kqueue.client.interfaces import Deadline
from kqueue.contract import Request, Verdict
from kqueue.errors import ConfigError, EvaluationFailed, InvalidRequest, LaneUnavailable
from kqueue.integrations.common import Connection, connect_async, lane_of, result_for
from kqueue.kernelbench import request_of

if TYPE_CHECKING:
    from kqueue.integrations.local import LocalKernelEvaluator

_log = logging.getLogger(__name__)

#: KernelBench's timing methods. All are accepted, and none changes the judge's own method.
TIMING_METHODS: Final = ("cuda_event", "host_time", "do_bench", "do_bench_impl")
#: Prefix of every kqueue token.
_PREFIX: Final = "kq_"
#: Seconds between two searches for a worker with the GPU type.
_RETRY_S: Final = 2.0


@dataclass
class ModalEvaluatorConfig:
    """Settings of :class:`ModalKernelEvaluator`. ``docs/evaluators.md`` explains each. Times are in seconds."""

    enabled: bool = True
    gpu_type: str = "A100"
    timeout: float = 120
    max_batch_size: int = 32
    return_exceptions: bool = True
    batch_single: bool = True
    batch_window_s: float = 0.15
    modal_token_env: str = "MODAL_TOKEN_ID"  # noqa: S105 a name
    deployment_mode: Literal["deployed", "ephemeral"] = "deployed"
    wait_for_gpu: bool = True
    max_queue_wait_s: float | None = None
    #: The fields that were given, for :func:`get_modal_evaluator`.
    _given: frozenset[str] = field(init=False, repr=False, compare=False)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        bound = inspect.signature(cls.__init__).bind_partial(self, *args, **kwargs)
        self._given = frozenset(bound.arguments) - {"self"}
        return self

    def __post_init__(self) -> None:
        if self.deployment_mode not in ("deployed", "ephemeral"):
            raise ConfigError(f"deployment_mode: {self.deployment_mode!r} is neither deployed nor ephemeral")
        if self.max_batch_size < 1:
            raise ConfigError(f"max_batch_size: must be at least 1, not {self.max_batch_size}")
        if self.batch_window_s < 0:
            raise ConfigError(f"batch_window_s: must be 0 or more seconds, not {self.batch_window_s}")


def _arguments(
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
) -> None:
    """Take the arguments of one evaluation."""


_SIGNATURE: Final = inspect.signature(_arguments)
#: The arguments that :func:`~kqueue.kernelbench.request_of` does not have. The last three concern the result.
_TRANSLATED: Final = (
    "ref_code", "kernel_code", "timing_method", "check_for_excessive_speedup", "excessive_speedup_threshold"
)  # fmt: skip


class ModalKernelEvaluator:
    """An evaluator of kernels on a fleet. Threads and event loops can share it."""

    def __init__(self, config: ModalEvaluatorConfig | None = None, client: AsyncClient | None = None) -> None:
        """Configure an evaluator. The first evaluation connects, unless a client is given, which stays open."""
        self.config = config or ModalEvaluatorConfig()
        self._given = client
        self._own = Connection(self._connect)
        self._local = Connection(self._local_evaluator)
        self._batchers = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, ModalBatcher]()
        #: GPU types for which a warning about the wait was logged.
        self._awaited = set[str]()

    async def evaluate_single(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Evaluate one kernel. ``docs/evaluators.md`` has the arguments, by position or by name, and the result's keys.

        Raises:
            LaneUnavailable: no worker has such a GPU, and ``wait_for_gpu`` is off or ``max_queue_wait_s`` is over.
            EvaluationFailed: the fleet or the problem failed, so the kernel's quality is unknown.
            ConfigError, ServiceError: evaluation is disabled, or there is no fleet.
        """
        return _raised(await self._evaluate([_SIGNATURE.bind(*args, **kwargs).arguments]))[0]

    async def evaluate_batch(self, evaluations: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Evaluate many kernels, given by the arguments' names, at once, and return the results in order.

        Other names have no effect, and ``metadata["ignored_fields"]`` lists them. With ``return_exceptions``, an entry
        for which :meth:`evaluate_single` would have raised has a record with the same keys and ``exception_type`` in
        its ``metadata``. LaneUnavailable, ConfigError and ServiceError are always raised.
        """
        results = await self._evaluate(evaluations)
        if not self.config.return_exceptions:
            return _raised(results)
        return [
            _record(evaluation, result) if isinstance(result, Exception) else result
            for evaluation, result in zip(evaluations, results, strict=True)
        ]

    async def evaluate_single_batched(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Run :meth:`evaluate_single`, but send the calls of ``batch_window_s`` seconds together."""
        if not self.config.batch_single:
            return await self.evaluate_single(*args, **kwargs)
        batcher = self._batchers.setdefault(asyncio.get_running_loop(), ModalBatcher(self))
        return await batcher.submit(_SIGNATURE.bind(*args, **kwargs).arguments)

    async def close(self) -> None:
        """Close the connections that this evaluator opened, and stop the fleet that it started."""
        if (client := self._own.take()) is not None:
            await client.close()
        if (local := self._local.take()) is not None:
            await asyncio.to_thread(local.close)

    async def _evaluate(self, evaluations: Iterable[Mapping[str, Any]]) -> list[dict[str, Any] | Exception]:
        if not self.config.enabled:
            raise ConfigError("evaluation is disabled: set enabled=True in ModalEvaluatorConfig")
        asked = [self._asked(each) for each in evaluations]
        requests = [each[0] for each in asked if isinstance(each, tuple)]
        verdicts = iter(await self._judge(requests) if requests else [])
        return [_result(*each, next(verdicts)) if isinstance(each, tuple) else each for each in asked]

    async def _judge(self, requests: list[Request]) -> list[Verdict | InvalidRequest]:
        """Evaluate requests. Retry, or raise, the errors of those whose GPU type no worker has."""
        results = [*await self._verdicts(requests)]
        deadline = Deadline(self.config.max_queue_wait_s)
        while missing := [index for index, error in enumerate(results) if isinstance(error, LaneUnavailable)]:
            why = cast("LaneUnavailable", results[missing[0]])
            left_s = deadline.left_s()
            if not self.config.wait_for_gpu or left_s == 0:
                raise why
            if self.config.gpu_type not in self._awaited:
                self._awaited.add(self.config.gpu_type)
                _log.warning("gpu_type %s: evaluations wait for a worker: %s", self.config.gpu_type, why)
            # A request is recorded once a lane accepts it. Until then it can use the fallback when workers return.
            await asyncio.sleep(_RETRY_S if left_s is None else min(_RETRY_S, left_s))
            retried = await self._verdicts([requests[index] for index in missing])
            for index, result in zip(missing, retried, strict=True):
                results[index] = result
        return results

    async def _verdicts(self, requests: list[Request]) -> Sequence[Verdict | InvalidRequest]:
        if self._given is None and self.config.deployment_mode == "ephemeral":
            return await asyncio.to_thread(self._local.client().judge, requests)
        return await (self._given or self._own.client()).evaluate_batch(requests)

    def _connect(self) -> AsyncClient:
        token = os.environ.get(self.config.modal_token_env, "")
        return connect_async(token=token if token.startswith(_PREFIX) else None)

    def _local_evaluator(self) -> LocalKernelEvaluator:
        from kqueue.integrations.local import LocalKernelEvaluator

        return LocalKernelEvaluator(gpu=self.config.gpu_type)

    def _asked(self, evaluation: Mapping[str, Any]) -> tuple[Request, dict[str, Any], float | None] | InvalidRequest:
        """Return an evaluation's request, its own part of the result's metadata, and the threshold of speedups."""
        # Some clients add other entries, which evaluators on Modal ignore too.
        known = {name: value for name, value in evaluation.items() if name in _SIGNATURE.parameters}
        try:
            bound = _SIGNATURE.bind(**known)
        except TypeError as error:
            return InvalidRequest(f"evaluation: {error}. See the arguments of evaluate_single")
        bound.apply_defaults()
        problem, kernel, method, limited, threshold = (bound.arguments.pop(name) for name in _TRANSLATED)
        if method not in TIMING_METHODS:
            methods = ", ".join(TIMING_METHODS)
            return InvalidRequest(f"timing_method: {method!r} is not known: use one of {methods}")
        limits = {"timeout_s": self.config.timeout, "queue_wait_s": self.config.max_queue_wait_s}
        try:
            request = request_of(problem, kernel, lane=lane_of(self.config.gpu_type), **limits, **bound.arguments)
        except InvalidRequest as error:
            return error
        metadata: dict[str, Any] = {"timing_method": method}
        if ignored := sorted(evaluation.keys() - known.keys()):
            metadata["ignored_fields"] = ignored
        return request, metadata, threshold if limited else None


class ModalBatcher:
    """Collects an event loop's evaluations for ``batch_window_s`` seconds, and sends them together."""

    # It needs no lock, because there is no await between a check and its use.

    def __init__(self, evaluator: ModalKernelEvaluator) -> None:
        """Collect for ``evaluator``, by its settings ``max_batch_size`` and ``batch_window_s``."""
        self._evaluator = evaluator
        #: The calls of the current window, its early end, and the task of its results.
        self._window: tuple[list[Mapping[str, Any]], asyncio.Event, asyncio.Task[Any]] | None = None

    async def submit(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Evaluate one kernel together with other calls, like :meth:`ModalKernelEvaluator.evaluate_single`."""
        if self._window is None:
            calls, full = list[Mapping[str, Any]](), asyncio.Event()
            self._window = calls, full, asyncio.create_task(self._run(calls, full))
        calls, full, results = self._window
        place = len(calls)
        calls.append(request)
        if len(calls) >= self._evaluator.config.max_batch_size:
            self._window = None
            full.set()
        # A cancelled call does not cancel the evaluations of other calls.
        return _raised([(await asyncio.shield(results))[place]])[0]

    async def _run(self, calls: list[Mapping[str, Any]], full: asyncio.Event) -> list[dict[str, Any] | Exception]:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(full.wait(), self._evaluator.config.batch_window_s)
        if not full.is_set():
            self._window = None
        return await self._evaluator._evaluate(calls)  # pyright: ignore[reportPrivateUsage]


def _raised(results: Iterable[dict[str, Any] | Exception]) -> list[dict[str, Any]]:
    good: list[dict[str, Any]] = []
    for result in results:
        if isinstance(result, Exception):
            raise result
        good.append(result)
    return good


def _result(
    request: Request, metadata: dict[str, Any], threshold: float | None, verdict: Verdict | InvalidRequest
) -> dict[str, Any] | Exception:
    if isinstance(verdict, InvalidRequest):
        return verdict
    try:
        metadata = result_for(request, verdict, threshold=threshold, **metadata)["metadata"]
    except EvaluationFailed as error:
        return error
    return _row(request.settings.checks, request.kernel, verdict, metadata)


def _record(evaluation: Mapping[str, Any], error: Exception) -> dict[str, Any]:
    """Return the record of an entry without a result, in the form of evaluators on Modal."""
    metadata: dict[str, Any] = {"exception": str(error), "exception_type": type(error).__name__}
    if isinstance(error, EvaluationFailed):
        metadata |= {name: str(getattr(error.verdict, name)) for name in ("category", "blame", "evaluation_id")}
    return _row(evaluation.get("num_correct_trials", 5), str(evaluation.get("kernel_code", "")), error, metadata)


def _row(trials: int, kernel: str, end: Verdict | Exception, metadata: dict[str, Any]) -> dict[str, Any]:
    verdict = end if isinstance(end, Verdict) else None
    passed = verdict is not None and verdict.passed
    message = f"{type(end).__name__}: {end}" if verdict is None else f"{verdict.category}: {verdict.message}"
    return {
        "format_ok": True,
        "compiled": bool(verdict and verdict.compiled),
        "correctness": passed,
        "tests_passed": trials if passed else 0,
        "tests_total": trials,
        "speedup": verdict and verdict.speedup,
        "runtime_ms": verdict and verdict.runtime_ms,
        "baseline_runtime_ms": verdict and verdict.baseline_ms,
        "error_message": None if passed else message,
        "code_length": len(kernel),
        "metadata": metadata,
    }


_global_lock: Final = threading.Lock()
_global: ModalKernelEvaluator | None = None


def get_modal_evaluator(config: ModalEvaluatorConfig | None = None) -> ModalKernelEvaluator:
    """Return the process's evaluator, creating it on first use.

    The fields that were given to ``config`` replace the evaluator's. The other fields keep their values, so that a
    caller that sets only a timeout does not move to another GPU.
    """
    global _global
    with _global_lock:
        if _global is None:
            _global = ModalKernelEvaluator(config)
        elif config is not None:
            given = {name: getattr(config, name) for name in config._given}  # pyright: ignore[reportPrivateUsage]
            _global.config = replace(_global.config, **given)
        return _global


def set_modal_evaluator(evaluator: ModalKernelEvaluator | None) -> None:
    """Set the process's evaluator. None makes :func:`get_modal_evaluator` create a new one."""
    global _global
    with _global_lock:
        _global = evaluator


async def evaluate_kernel_single(
    ref_code: str, kernel_code: str, backend: str = "triton", **kwargs: Any
) -> dict[str, Any]:
    """Evaluate one kernel with the process's evaluator. See :meth:`ModalKernelEvaluator.evaluate_single`."""
    return await get_modal_evaluator().evaluate_single(ref_code, kernel_code, backend, **kwargs)


async def evaluate_kernel_batch(
    evaluations: Sequence[Mapping[str, Any]], config: ModalEvaluatorConfig | None = None
) -> list[dict[str, Any]]:
    """Evaluate many kernels with the process's evaluator. See :meth:`ModalKernelEvaluator.evaluate_batch`."""
    return await get_modal_evaluator(config).evaluate_batch(evaluations)
