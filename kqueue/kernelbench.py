"""KernelBench's arguments as a request, and a verdict as KernelBench's result, for all integrations.

Three things differ from KernelBench:

- Each phase has a deadline, instead of one timeout for all. The wait for a worker does not count.
- ``num_perf_trials`` is the maximum number of timed calls. Timing ends earlier if the median is precise enough.
- Kernels are checked more strictly than by ``torch.allclose`` on the given inputs, unless ``comparison`` is
  ``kernelbench``. ``metadata["kernelbench_correct"]`` is the result of KernelBench's comparison.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kqueue import backends
from kqueue.categories import OF_OUTPUTS, Blame, Category
from kqueue.contract import Comparison, Deadlines, Precision, Request, Settings, Timing, Verdict, parse_request
from kqueue.errors import InvalidRequest
from kqueue.evidence import Measurement, json_number
from kqueue.states import Purpose

#: The arguments of KernelBench's evaluation with their defaults.
_DEFAULTS: Final[Mapping[str, Any]] = {
    "backend": "cuda",
    "seed_num": None,
    "num_correct_trials": 5,
    "num_perf_trials": 100,
    "measure_performance": True,
    "purpose": Purpose.RANK,
    "precision": "fp32",
    "comparison": Comparison.STRICT,
    "timeout_s": None,
}
#: Minimum number of timed calls. Smaller numbers are raised to it.
MIN_PERF_TRIALS: Final = 5
#: Names of the precisions, including torch's own.
_PRECISIONS: Final = {
    "fp32": Precision.FP32,
    "float32": Precision.FP32,
    "fp16": Precision.FP16,
    "float16": Precision.FP16,
    "half": Precision.FP16,
    "bf16": Precision.BF16,
    "bfloat16": Precision.BF16,
}
#: Failures of the outputs, which KernelBench calls correctness issues.
_ABOUT_OUTPUTS: Final = OF_OUTPUTS | {Category.NONDETERMINISTIC, Category.REWARD_HACK}


def request_of(problem: str, kernel: str, **arguments: Any) -> Request:
    """Return the request for the arguments of KernelBench's evaluation. Raise InvalidRequest that names a wrong one.

    ``problem`` is the source of ``Model``, and ``kernel`` the source of ``ModelNew``. KernelBench's arguments are:

    - ``backend``: name of a backend in any case. The default is ``cuda``.
    - ``seed_num``: seed before both constructors, by default a secret one. The seeds of inputs are secret.
    - ``num_correct_trials`` (5): number of input sets to check, 1 to 100.
    - ``num_perf_trials`` (100): maximum number of timed calls, up to 10,000. 0 disables timing, and 1 to 4 count as 5.
    - ``measure_performance`` (True): False disables timing.
    - ``purpose``: :class:`~kqueue.states.Purpose` of the times, ``rank`` by default.
    - ``precision``: ``fp32`` (the default), ``fp16`` or ``bf16``, or torch's names for them.
    - ``comparison``: ``strict`` (the default) or ``kernelbench``.
    - ``timeout_s``: maximum seconds of each phase. None keeps the :class:`~kqueue.contract.Deadlines`.

    Any other argument is a field of :class:`~kqueue.contract.Request`, such as ``lane`` or ``batch``.
    """
    asked = {**_DEFAULTS, **arguments}
    checks = _whole("num_correct_trials", asked["num_correct_trials"], 1, 100)
    calls = _whole("num_perf_trials", asked["num_perf_trials"], 0, 10_000)
    purpose = asked["purpose"] if asked["measure_performance"] and calls > 0 else Purpose.CHECK
    number = {} if calls == Timing().calls else {"calls": max(calls, MIN_PERF_TRIALS)}
    settings = {
        "precision": _precision(asked["precision"]),
        "seed": None if asked["seed_num"] is None else _whole("seed_num", asked["seed_num"], 0, 2**63 - 1),
        "timing": {"purpose": purpose, **number},
        "comparison": asked["comparison"],
        "deadlines": _deadlines(asked["timeout_s"]),
        # Numbers with the same default here and there do not count as set. Clients of drop-ins send all of them.
        **({} if checks == Settings().checks else {"checks": checks}),
    }
    fields = {name: value for name, value in asked.items() if name not in _DEFAULTS}
    backend, known = str(asked["backend"]).lower(), backends.registered()
    if backend not in known:
        raise InvalidRequest(f"backend: {asked['backend']!r} cannot be judged here: use one of {', '.join(known)}")
    return parse_request({"problem": problem, "kernel": kernel, "backend": backend, "settings": settings, **fields})


def result_of(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as KernelBench's result.

    Returns:
        A JSON-safe record:

        - ``compiled`` and ``correctness``. They are also False if the result is unknown (see ``metadata["blame"]``).
        - ``runtime`` and ``ref_runtime``: mean time in milliseconds, as in KernelBench, or -1.0 without a time.
        - ``runtime_stats`` and ``ref_runtime_stats``: ``mean``, ``median``, ``std``, ``min`` and ``max`` in
          milliseconds, ``num_trials``, ``hardware`` and ``device``. Empty without a time.
        - ``metadata``: ``category``, ``blame``, ``evaluation_id``, ``message``, ``phase``, ``facts``, ``lane``,
          ``attempts``, ``reused_from`` (the evaluation whose verdict was reused, if any), ``hardware`` and
          ``device``. It also has KernelBench's own keys, such as ``compilation_error``, ``runtime_error``,
          ``correctness_issue`` and ``max_difference``. For a passed kernel it has ``correctness_trials`` (passed and
          requested: ``(5 / 5)``), ``hidden_trials`` (number of hidden variants that it passed too), ``speedup`` (of
          medians), ``timing_basis`` and ``kernelbench_correct``.
    """
    hardware = verdict.environment.device if verdict.environment else None
    # A candidate sees only one GPU.
    where = {"hardware": hardware, "device": "cpu" if verdict.lane == "cpu" else "cuda:0"}
    return {
        "compiled": bool(verdict.compiled),
        "correctness": bool(verdict.correctness),
        "metadata": {
            "category": str(verdict.category),
            "blame": str(verdict.blame),
            "evaluation_id": str(verdict.evaluation_id),
            "message": verdict.message,
            "phase": verdict.phase and str(verdict.phase),
            "facts": verdict.facts.model_dump(mode="json"),
            "lane": verdict.lane,
            "attempts": verdict.attempts,
            "reused_from": verdict.reused_from and str(verdict.reused_from),
            **where,
            **(_of_success(verdict) if verdict.passed else _of_failure(verdict)),
        },
        "runtime": verdict.runtime.mean_ms if verdict.runtime and verdict.runtime_ms else -1.0,
        "runtime_stats": _stats(verdict.runtime, where),
        "ref_runtime": verdict.baseline.mean_ms if verdict.baseline and verdict.baseline_ms else -1.0,
        "ref_runtime_stats": _stats(verdict.baseline, where),
    }


def _of_success(verdict: Verdict) -> dict[str, Any]:
    evidence, counts = verdict.evidence, dict[str, Any]()
    if evidence.checks is not None:  # a summary has no evidence
        # Earlier versions did not record the requested number.
        asked = evidence.checks if evidence.checks_asked is None else evidence.checks_asked
        counts = {"correctness_trials": f"({asked} / {asked})", "hidden_trials": evidence.checks - asked}
    return {
        **counts,
        "speedup": verdict.speedup,
        "speedup_low": verdict.speedup_interval[0] if verdict.speedup_interval else None,
        "timing_basis": verdict.timing_basis,
        "kernelbench_correct": evidence.comparison and evidence.comparison.kernelbench_correct,
    }


def _of_failure(verdict: Verdict) -> dict[str, Any]:
    """Return the keys that KernelBench's scripts read."""
    facts = verdict.facts
    name = facts.exception or str(verdict.category)
    if verdict.blame is not Blame.CANDIDATE:
        return {"error": f"{verdict.category}: {verdict.message}", "error_name": name}
    if verdict.compiled is False:
        return {"compilation_error": verdict.message, "compilation_error_name": name}
    if verdict.category not in _ABOUT_OUTPUTS:
        traceback = {"runtime_error_traceback": verdict.log} if verdict.log else {}
        return {"runtime_error": verdict.message, "runtime_error_name": name, **traceback}
    issue: dict[str, Any] = {"correctness_issue": verdict.message, "correctness_issue_name": name}
    if (comparison := verdict.evidence.comparison) is not None:
        issue |= {"kernelbench_correct": comparison.kernelbench_correct, "strict_correct": comparison.strict_correct}
    if facts.errors is not None:
        # KernelBench lists one difference per trial. The judge stops at the first wrong trial.
        issue["max_difference"] = [str(json_number(facts.errors.max_abs_error))]
    return issue


def error_code(category: Category) -> str:
    """Return KernelGYM's code of a failure."""
    if category.blame is not Blame.CANDIDATE:
        return "VALIDATION_ERROR" if category.blame is Blame.PROBLEM else "SYSTEM_ERROR"
    own = {Category.SYNTAX_ERROR: "SYNTAX_ERROR", Category.TIMEOUT: "TIMEOUT_ERROR"}.get(category)
    later = "CORRECTNESS_ERROR" if category in _ABOUT_OUTPUTS else "RUNTIME_ERROR"
    return own or (later if category.info.compiled else "COMPILATION_ERROR")


def _stats(measurement: Measurement | None, where: dict[str, Any]) -> dict[str, Any]:
    if measurement is None or measurement.median_ms <= 0:
        return {}
    times = {name: getattr(measurement, f"{name}_ms") for name in ("mean", "median", "std", "min", "max")}
    return {**times, "num_trials": measurement.count, **where}


def _precision(name: object) -> Precision:
    try:
        return _PRECISIONS[str(name).lower().removeprefix("torch.")]
    except KeyError:
        raise InvalidRequest(f"precision: {name!r} is not known: use fp32, fp16 or bf16") from None


def _deadlines(timeout_s: float | None) -> Deadlines:
    if timeout_s is None:
        return Deadlines()
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < float("inf"):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidRequest(f"timeout: seconds above 0 are needed, not {timeout_s!r}")
    return Deadlines(**{name: timeout_s for name, value in Deadlines().model_dump().items() if timeout_s < value})


def _whole(name: str, value: object, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidRequest(f"{name}: a whole number from {least} to {most} is needed, not {value!r}")
    return value
