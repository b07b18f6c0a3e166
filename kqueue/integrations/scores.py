"""From a verdict to one number, for searches and trainers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from kqueue.contract import Verdict
from kqueue.errors import ConfigError

#: The policies that have names.
Policy = Literal["inverse_runtime", "speedup", "correctness"]
#: A policy by name, or any function of a verdict; None where the verdict tells nothing of the kernel.
Score = Policy | Callable[[Verdict], float | None]


def scorer(score: Score) -> Callable[[Verdict], float | None]:
    """The function behind a policy.

    ``inverse_runtime`` is 0 for a kernel that failed and 1 / seconds for a right one, ``speedup`` 0 and the
    speedup over the reference, ``correctness`` 0 and 1. Each is None where nothing is known: the fleet or the
    problem failed, the evaluation was cancelled or expired, or (for the first two) no time was taken.

    Raises:
        ConfigError: there is no policy of this name.
    """
    if callable(score):
        return score
    try:
        return _POLICIES[score]
    except KeyError:
        raise ConfigError(f"score: {score!r} is no policy; use {', '.join(_POLICIES)} or a function") from None


def inverse_runtime(verdict: Verdict) -> float | None:
    """1 / seconds of a right kernel: see :func:`scorer`."""
    runtime = verdict.runtime_ms
    return _if_right(verdict, 1e3 / runtime if runtime is not None and runtime > 0 else None)


def speedup(verdict: Verdict) -> float | None:
    """The speedup of a right kernel: see :func:`scorer`."""
    return _if_right(verdict, verdict.speedup)


def correctness(verdict: Verdict) -> float | None:
    """Whether a kernel is right: see :func:`scorer`."""
    return _if_right(verdict, 1.0)


def _if_right(verdict: Verdict, value: float | None) -> float | None:
    if not verdict.judged:
        return None
    return value if verdict.passed else 0.0


_POLICIES: Final[dict[str, Callable[[Verdict], float | None]]] = {
    "inverse_runtime": inverse_runtime,
    "speedup": speedup,
    "correctness": correctness,
}
