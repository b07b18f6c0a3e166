"""Turn a verdict into one number, for searches and trainers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from kqueue.contract import Verdict
from kqueue.errors import ConfigError

#: The names of policies.
Policy = Literal["inverse_runtime", "speedup", "bandwidth", "correctness"]
#: A policy's name, or a function that returns a score, or None if the kernel's quality is unknown.
Score = Policy | Callable[[Verdict], float | None]


def scorer(score: Score) -> Callable[[Verdict], float | None]:
    """Return the function for a policy.

    A failed kernel scores 0. A correct one scores 1 / seconds under ``inverse_runtime``, its speedup over the
    reference under ``speedup``, its share of the memory bandwidth under ``bandwidth`` (on a GPU: the time to read the
    inputs and write the outputs once, divided by its runtime), and 1 under ``correctness``. The score is None if it is
    unknown: the fleet or the problem failed, the evaluation was cancelled or expired, or (except for
    ``correctness``) the kernel was not timed.

    Raises:
        ConfigError: there is no policy of this name.
    """
    if callable(score):
        return score
    try:
        return _POLICIES[score]
    except KeyError:
        raise ConfigError(f"score: unknown policy {score!r}: use {', '.join(_POLICIES)} or a function") from None


def inverse_runtime(verdict: Verdict) -> float | None:
    """Return 1 / seconds for a correct kernel. See :func:`scorer`."""
    runtime = verdict.runtime_ms
    return _if_passed(verdict, 1e3 / runtime if runtime is not None and runtime > 0 else None)


def speedup(verdict: Verdict) -> float | None:
    """Return the speedup of a correct kernel. See :func:`scorer`."""
    return _if_passed(verdict, verdict.speedup)


def bandwidth(verdict: Verdict) -> float | None:
    """Return the share of the memory bandwidth that a correct kernel reached. See :func:`scorer`."""
    floor, runtime = verdict.evidence.floor, verdict.runtime_ms
    return _if_passed(verdict, floor.floor_ms / runtime if floor is not None and runtime else None)


def correctness(verdict: Verdict) -> float | None:
    """Return 1 for a correct kernel. See :func:`scorer`."""
    return _if_passed(verdict, 1.0)


def _if_passed(verdict: Verdict, value: float | None) -> float | None:
    if not verdict.judged:
        return None
    return value if verdict.passed else 0.0


_POLICIES: Final[dict[str, Callable[[Verdict], float | None]]] = {
    "inverse_runtime": inverse_runtime,
    "speedup": speedup,
    "bandwidth": bandwidth,
    "correctness": correctness,
}
