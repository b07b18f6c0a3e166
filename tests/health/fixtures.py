"""Fixtures of a fleet on fake GPUs. Pytest loads this module as a plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.fleet import told
from tests.health.gpus import Gpus, Watcher


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Gpus:
    return Gpus(tmp_path_factory.mktemp("nvml"), 2)


@pytest.fixture(scope="module")
def start_gpu_fleet(services: told.Services, fake: Gpus) -> Iterator[Callable[..., told.Fleet]]:
    """Start a fleet with one slot on each fake GPU and scripted judges."""
    with told.fleets(services) as start:

        def on_gpus(**settings: Any) -> told.Fleet:
            variables = {"PYTHONPATH": f"{fake.directory}:{told.HERE}", "JUDGES_SELF_TEST": "self_test_double"}
            given: dict[str, Any] = {"slots": 2, "cpu_slots": 0, "gpus": "all", "slots_per_gpu": 1}
            return start(variables=variables, **given | settings)

        yield on_gpus


@pytest.fixture
def watcher(services: told.Services, fake: Gpus) -> Watcher:
    return Watcher(services, fake)
