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
    """Settings of :class:`ModalKernelEvaluator`.

    Attributes:
        enabled: if False, every evaluation raises :class:`~kqueue.errors.ConfigError`.
        gpu_type: the GPU's model, such as ``A100`` or ``L40S``. See :func:`lane_of`.
        timeout: limit of each phase of an evaluation in seconds, without the wait for a GPU.
        max_batch_size: maximum number of calls of ``evaluate_single_batched`` to send together.
        return_exceptions: True if ``evaluate_batch`` returns a record for each entry, even without a result. If False,
            it raises the first entry's exception.
        batch_single: True if ``evaluate_single_batched`` waits for other calls to send together.
        batch_window_s: seconds of that wait.
        modal_token_env: the environment variable with the token for a fleet behind HTTP. Only a kqueue token is sent,
            never a Modal token. Without one, ``KQUEUE_TOKEN`` is used.
        deployment_mode: ``deployed`` uses the fleet of the settings or of this machine. ``ephemeral`` starts one on
            this machine if none runs, and stops it after ten idle minutes.
        wait_for_gpu: True to wait for a worker if none serves the GPU type or ``KQUEUE_GPU_FALLBACK``. If False,
            :class:`~kqueue.errors.LaneUnavailable` is raised, which callers often mistake for a bad kernel.
        max_queue_wait_s: maximum seconds that an evaluation waits for a worker with the GPU type, and again for a free
            one. None stands for no limit.
    """

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
    _given: frozenset[str] = field(init=False, repr=False, compare=False)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Record which fields are given, for :func:`get_modal_evaluator`."""
        self = super().__new__(cls)
        arguments = inspect.signature(cls.__init__).bind_partial(self, *args, **kwargs).arguments
        self._given = frozenset(arguments) - {"self"}
        return self

    def over(self, earlier: ModalEvaluatorConfig) -> ModalEvaluatorConfig:
        """Return ``earlier`` with the fields that were given to this one."""
        return replace(earlier, **{name: getattr(self, name) for name in self._given})

    def __post_init__(self) -> None:
        if self.deployment_mode not in ("deployed", "ephemeral"):
            raise ConfigError(f"deployment_mode: {self.deployment_mode!r} is neither deployed nor ephemeral")
        if self.max_batch_size < 1:
            raise ConfigError(f"max_batch_size: must be at least 1, not {self.max_batch_size}")
        if self.batch_window_s < 0:
            raise ConfigError(f"batch_window_s: must be 0 or more seconds, not {self.batch_window_s}")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The arguments of one evaluation.

    Attributes:
        num_perf_trials: maximum number of timed calls.
        precision: ``fp32``, ``fp16`` or ``bf16``.
        timing_method: one of :data:`TIMING_METHODS`, for compatibility. The judge always uses its own method, which
            ``metadata["timing_basis"]`` names.
        check_for_excessive_speedup: True to flag an implausible speedup in ``metadata["excessive_speedup"]``.
        excessive_speedup_threshold: speedup above which it is implausible.
    """

    ref_code: str
    kernel_code: str
    backend: str = "triton"
    num_correct_trials: int = 5
    measure_performance: bool = False
    num_perf_trials: int = 100
    precision: str = "fp32"
    timing_method: str = "cuda_event"
    check_for_excessive_speedup: bool = True
    excessive_speedup_threshold: float = 10.0


_SIGNATURE: Final = inspect.signature(Evaluation)


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
        """Evaluate one kernel. It takes the arguments of :class:`Evaluation`, by position or by name.

        Returns:
            ``format_ok`` (True, because clients check the format themselves), ``compiled``, ``correctness``,
            ``tests_passed`` (all or 0, because the judge stops at the first failure), ``tests_total``, ``speedup``,
            ``runtime_ms``, ``baseline_runtime_ms`` (medians in milliseconds), ``error_message``, ``code_length``
            (characters), ``metadata`` (see :func:`~kqueue.kernelbench.result_of`). Unknown values are None.

        Raises:
            LaneUnavailable: no worker has such a GPU, and ``wait_for_gpu`` is off or ``max_queue_wait_s`` is over.
            EvaluationFailed: the fleet or the problem failed, so the kernel's quality is unknown.
            ConfigError, ServiceError: evaluation is disabled, or there is no fleet.
        """
        return _raised(await self._evaluate([_SIGNATURE.bind(*args, **kwargs).arguments]))[0]

    async def evaluate_batch(self, evaluations: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Evaluate many kernels at once.

        Args:
            evaluations: the arguments of :class:`Evaluation` by name, for each kernel. Other names have no effect,
                and ``metadata["ignored_fields"]`` lists them.

        Returns:
            The results in order. With ``return_exceptions``, an entry for which :meth:`evaluate_single` would have
            raised has a record with the same keys. Its ``compiled`` and ``correctness`` are False and mean nothing.
            Its ``metadata`` has ``exception`` and ``exception_type``, and also ``category``, ``blame`` and
            ``evaluation_id`` if the evaluation ended without a result.

        Raises:
            LaneUnavailable, ConfigError, ServiceError: see :meth:`evaluate_single`. ``return_exceptions`` is ignored.
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
        orders = [self._order(each) for each in evaluations]
        requests = [order.request for order in orders if isinstance(order, _Order)]
        verdicts = iter(await self._judge(requests) if requests else [])
        return [_result(order, next(verdicts)) if isinstance(order, _Order) else order for order in orders]

    async def _judge(self, requests: list[Request]) -> list[Verdict | InvalidRequest]:
        """Evaluate requests. Retry, or raise, the errors of those whose GPU type no worker has."""
        results = [*await self._asked(requests)]
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
            retried = await self._asked([requests[index] for index in missing])
            for index, result in zip(missing, retried, strict=True):
                results[index] = result
        return results

    async def _asked(self, requests: list[Request]) -> Sequence[Verdict | InvalidRequest]:
        if self._given is None and self.config.deployment_mode == "ephemeral":
            return await asyncio.to_thread(self._local.client().judge, requests)
        return await (self._given or self._own.client()).evaluate_batch(requests)

    def _connect(self) -> AsyncClient:
        token = os.environ.get(self.config.modal_token_env, "")
        return connect_async(token=token if token.startswith(_PREFIX) else None)

    def _local_evaluator(self) -> LocalKernelEvaluator:
        from kqueue.integrations.local import LocalKernelEvaluator

        return LocalKernelEvaluator(gpu=self.config.gpu_type)

    def _order(self, evaluation: Mapping[str, Any]) -> _Order | InvalidRequest:
        # Some clients add other entries, which evaluators on Modal ignore too.
        ignored = sorted(evaluation.keys() - _SIGNATURE.parameters.keys())
        given = {name: value for name, value in evaluation.items() if name not in ignored}
        try:
            asked = Evaluation(**_SIGNATURE.bind(**given).arguments)
        except TypeError as error:
            return InvalidRequest(f"evaluation: {error}. See the arguments of evaluate_single")
        if asked.timing_method not in TIMING_METHODS:
            methods = ", ".join(TIMING_METHODS)
            return InvalidRequest(f"timing_method: {asked.timing_method!r} is not known: use one of {methods}")
        try:
            request = request_of(
                asked.ref_code,
                asked.kernel_code,
                backend=asked.backend,
                num_correct_trials=asked.num_correct_trials,
                num_perf_trials=asked.num_perf_trials,
                measure_performance=asked.measure_performance,
                precision=asked.precision,
                timeout_s=self.config.timeout,
                lane=lane_of(self.config.gpu_type),
                queue_wait_s=self.config.max_queue_wait_s,
            )
        except InvalidRequest as error:
            return error
        return _Order(request, asked, ignored)


@dataclass(frozen=True, slots=True)
class _Order:
    """A request, the arguments that it was built from, and the names that were ignored."""

    request: Request
    asked: Evaluation
    ignored: list[str]


class ModalBatcher:
    """Collects an event loop's evaluations for ``batch_window_s`` seconds, and sends them together."""

    # It needs no lock, because there is no await between a check and its use.

    def __init__(self, evaluator: ModalKernelEvaluator) -> None:
        """Collect for ``evaluator``, by its settings ``max_batch_size`` and ``batch_window_s``."""
        self._evaluator = evaluator
        self._batch: _Batch | None = None

    async def submit(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Evaluate one kernel together with other calls, like :meth:`ModalKernelEvaluator.evaluate_single`."""
        if self._batch is None:
            self._batch = _Batch()
            self._batch.results = asyncio.create_task(self._run(self._batch))
        batch, place = self._batch, len(self._batch.requests)
        batch.requests.append(request)
        if len(batch.requests) >= self._evaluator.config.max_batch_size:
            self._batch = None
            batch.full.set()
        # A cancelled call does not cancel the evaluations of other calls.
        return _raised([(await asyncio.shield(batch.results))[place]])[0]

    async def _run(self, batch: _Batch) -> list[dict[str, Any] | Exception]:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(batch.full.wait(), self._evaluator.config.batch_window_s)
        if self._batch is batch:
            self._batch = None
        return await self._evaluator._evaluate(batch.requests)  # pyright: ignore[reportPrivateUsage]


class _Batch:
    """The calls of one window."""

    results: asyncio.Task[list[dict[str, Any] | Exception]]

    def __init__(self) -> None:
        self.requests: list[Mapping[str, Any]] = []
        self.full = asyncio.Event()


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
    asked = order.asked
    metadata: dict[str, Any] = {"ignored_fields": order.ignored} if order.ignored else {}
    threshold = asked.excessive_speedup_threshold if asked.check_for_excessive_speedup else None
    try:
        result = result_for(order.request, verdict, threshold=threshold, timing_method=asked.timing_method, **metadata)
    except EvaluationFailed as error:
        return error
    message = None if verdict.passed else f"{verdict.category}: {verdict.message}"
    return _row(asked.num_correct_trials, order.request.kernel, message, result["metadata"], verdict)


def _record(evaluation: Mapping[str, Any], error: Exception) -> dict[str, Any]:
    """Return the record of an entry without a result, in the form of evaluators on Modal."""
    metadata: dict[str, Any] = {"exception": str(error), "exception_type": type(error).__name__}
    if isinstance(error, EvaluationFailed):
        metadata |= {name: str(getattr(error.verdict, name)) for name in ("category", "blame", "evaluation_id")}
    trials, kernel = evaluation.get("num_correct_trials", 5), str(evaluation.get("kernel_code", ""))
    return _row(trials, kernel, f"{type(error).__name__}: {error}", metadata, None)


def _row(
    trials: int, kernel: str, message: str | None, metadata: dict[str, Any], verdict: Verdict | None
) -> dict[str, Any]:
    passed = verdict is not None and verdict.passed
    return {
        "format_ok": True,
        "compiled": bool(verdict and verdict.compiled),
        "correctness": passed,
        "tests_passed": trials if passed else 0,
        "tests_total": trials,
        "speedup": verdict and verdict.speedup,
        "runtime_ms": verdict and verdict.runtime_ms,
        "baseline_runtime_ms": verdict and verdict.baseline_ms,
        "error_message": message,
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
            _global.config = config.over(_global.config)
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
