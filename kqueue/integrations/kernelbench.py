"""KernelBench's ``eval_kernel_against_ref``, judged by a fleet.

Change only the import::

from kqueue.integrations.kernelbench import eval_kernel_against_ref
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kqueue.integrations.common import SHARED, result_for
from kqueue.kernelbench import request_of


def eval_kernel_against_ref(
    original_model_src: str,
    custom_model_src: str,
    seed_num: int = 42,
    num_correct_trials: int = 1,
    num_perf_trials: int = 10,
    measure_performance: bool = False,
    timing_method: str = "cuda_event",
    verbose: bool = False,
    build_dir: object = None,  # noqa: ARG001 KernelBench's
    device: object = None,  # noqa: ARG001 KernelBench's
    backend: str = "cuda",
    precision: object = "fp32",
    check_for_excessive_speedup: bool = True,
    excessive_speedup_threshold: float = 10,
    **fields: Any,
) -> SimpleNamespace:
    """Judge a kernel, or raise EvaluationFailed if the fleet or the problem failed.

    It returns the attributes of KernelBench's ``KernelExecResult``: see :func:`~kqueue.kernelbench.result_of`.
    ``fields`` are other arguments of :func:`~kqueue.kernelbench.request_of`, such as ``comparison`` and ``lane``, which
    chooses the GPU's model. ``verbose`` writes the result to stderr.
    """
    request = request_of(
        original_model_src,
        custom_model_src,
        seed_num=seed_num,
        num_correct_trials=num_correct_trials,
        num_perf_trials=num_perf_trials,
        measure_performance=measure_performance,
        backend=backend,
        precision=str(precision),
        **fields,
    )
    verdict = SHARED.client().evaluate(request)
    threshold = excessive_speedup_threshold if check_for_excessive_speedup else None
    result = result_for(request, verdict, verbose=verbose, threshold=threshold, timing_method=timing_method)
    return SimpleNamespace(**result)
