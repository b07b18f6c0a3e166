"""Scores of a verdict by name: policies of :mod:`kqueue.integrations.common`, and functions of Python modules."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from kqueue.contract import Verdict
from kqueue.errors import ConfigError, InvalidRequest
from kqueue.integrations.common import scorer

#: Policies that need no times.
_UNTIMED: Final = frozenset({"correctness"})

Metric = Callable[[Verdict], float | None]


def metrics_of(names: Sequence[str], *, timed: bool) -> dict[str, Metric]:
    """Return the metrics with these names.

    Args:
        names: policies (:func:`~kqueue.integrations.common.scorer`), or ``module:function``. The working directory is
            searched for modules first. A function receives a :class:`~kqueue.Verdict` and returns a number (higher is
            better), or None if the kernel's quality is unknown.
        timed: False if kernels are not timed.

    Raises:
        InvalidRequest: there is no such policy or function, one is named twice, or it needs times.
    """
    if len(set(names)) != len(names):
        raise InvalidRequest("--metric: a metric is named twice")
    metrics = dict[str, Metric]()
    for name in names:
        if ":" in name:
            metrics[name] = _function(name)
            continue
        try:
            metrics[name] = scorer(name)  # pyright: ignore[reportArgumentType] a name that it refuses
        except ConfigError as error:
            raise InvalidRequest(f"--metric: {error}, as module:function") from None
        if not timed and name not in _UNTIMED:
            raise InvalidRequest(f"--metric {name}: needs times: omit --no-timing")
    return metrics


def scores_of(metrics: Mapping[str, Metric], verdict: Verdict) -> dict[str, float] | None:
    """Return the verdict's scores by the metrics' names, or None if one of them is unknown.

    Raises:
        InvalidRequest: a function raised, or did not return a finite number.
    """
    scores = dict[str, float]()
    for name, metric in metrics.items():
        score = metric(verdict)
        if score is None:
            return None
        scores[name] = score
    return scores


def _function(name: str) -> Metric:
    module, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function: object = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, SyntaxError, ValueError) as error:
        raise InvalidRequest(f"--metric {name}: {error}: give module:function") from None
    if not callable(function):
        raise InvalidRequest(f"--metric {name}: not a function")

    def guarded(verdict: Verdict) -> float | None:
        try:
            score: object = function(verdict)
        except Exception as error:
            raise InvalidRequest(f"--metric {name}: raised {type(error).__name__}: {error}") from error
        if score is None:
            return None
        if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
            raise InvalidRequest(f"--metric {name}: returned {score!r}: return a finite number or None")
        return float(score)

    return guarded
