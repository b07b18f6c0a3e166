"""Every setting at its least and its greatest value, on a healthy host."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from kqueue.categories import Blame, Category
from kqueue.contract import Request, Settings, parse_request
from kqueue.errors import InvalidRequest
from tests.judge.linear import PROBLEM, right
from tests.judge.rig import Rig
from workers.judge.pipeline import estimator

_SCHEMA = Settings.model_json_schema()
#: Settings of a request that is timed, with all parts that are left out by default.
_BASE: dict[str, Any] = {"checks": 2, "timing": {"calls": 10}, "tolerance": {"atol": 1e-4, "rtol": 1e-4}}
#: Cases that the gate judges, because they have ended as failures of the fleet or are near it.
_GATE = frozenset(
    {
        ("deadlines", "reference_s", 5e-324),
        ("deadlines", "time_s", 5e-324),
        ("limits", "host_memory_bytes", 256 << 20),
        ("limits", "processes", 16),
    }
)


def _bounds(schema: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each numeric setting, with its least and its greatest value at the end."""
    for name, field in schema.get("properties", {}).items():
        for form in field.get("anyOf", [field]):
            if "$ref" in form:
                for path in _bounds(_SCHEMA["$defs"][form["$ref"].rpartition("/")[2]]):
                    yield (name, *path)
            elif form.get("type") in ("integer", "number"):
                whole = form["type"] == "integer"
                least = form.get("minimum", math.nextafter(form.get("exclusiveMinimum", -math.inf), math.inf))
                most = form.get("maximum", form.get("exclusiveMaximum", sys.float_info.max) - whole)
                yield from ((name, least), (name, most))


_CASES = list(_bounds(_SCHEMA))


def _request(*path: Any, lane: str = "cpu") -> Request:
    *names, last, value = path
    settings: dict[str, Any] = {name: dict(part) if isinstance(part, dict) else part for name, part in _BASE.items()}
    part = settings
    for name in names:
        part = part.setdefault(name, {})
    part[last] = value
    fields = {"problem": PROBLEM, "kernel": right(), "backend": "torch", "lane": lane, "settings": settings}
    return parse_request(fields)


@pytest.mark.slow("judges many kernels")
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=() if path in _GATE else pytest.mark.nightly, id="-".join(map(str, path)))
        for path in _CASES
    ],
)
def test_no_setting_makes_the_fleet_fail(rig: Rig, path: tuple[Any, ...]) -> None:
    """No bound of a setting gives an outcome that blames the fleet."""
    outcome = rig.judge(_request(*path))
    assert outcome.blame is not Blame.FLEET, outcome
    assert outcome.category is not Category.INVALID_PROBLEM, outcome


@pytest.mark.gpu
@pytest.mark.nightly
@pytest.mark.parametrize("path", _CASES, ids=lambda path: "-".join(map(str, path)))
def test_no_setting_makes_a_fleet_with_gpus_fail(gpu_rig: Rig, path: tuple[Any, ...]) -> None:
    """The same holds on a GPU, where a process needs more memory and threads."""
    outcome = gpu_rig.judge(_request(*path, lane="gpu"))
    assert outcome.blame is not Blame.FLEET, outcome


def test_every_bound_is_found() -> None:
    """All parts of the settings are searched, and each bound is accepted."""
    assert {path[0] for path in _CASES} >= {"checks", "seed", "tolerance", "timing", "deadlines", "limits"}
    assert set(_CASES) >= _GATE
    for path in _CASES:
        assert _request(*path)


@pytest.mark.parametrize("value", [1e-300, 0.0099, -1, math.inf, math.nan])
def test_a_precision_that_no_gpu_reaches_is_refused(value: float) -> None:
    """The error names the least value, which the clock of a GPU can reach."""
    with pytest.raises(InvalidRequest, match=r"settings\.timing\.max_error: .*(at least 0\.01|greater|finite)"):
        _request("timing", "max_error", value)
    assert _request("timing", "max_error", 0.01)
    _, share = estimator._ERRORS["gpu_clock"].own
    assert math.hypot(share, share) < 0.01
