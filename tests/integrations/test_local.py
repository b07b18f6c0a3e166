"""The evaluator that starts a fleet."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kqueue import EvaluationFailed, InvalidRequest
from kqueue.config import Config, load
from kqueue.integrations.local import LocalKernelEvaluator
from kqueue.integrations.modal_like import ModalEvaluatorConfig, ModalKernelEvaluator
from kqueue.local.fleet import LocalFleet
from tests.integrations.sources import BROKEN_REFERENCE, QUICK, REFERENCE, RIGHT, WRONG


@pytest.fixture
def own_home() -> Iterator[Config]:
    """Return the settings of a home without a running fleet."""
    with tempfile.TemporaryDirectory(prefix="kqueue-test-") as name:
        root = Path(name)
        root.chmod(0o711)
        yield load(home=root / "home", scratch=root / "scratch", gpus="none", cpu_slots=1)


def test_a_fleet_that_is_up_is_used(fleet: LocalFleet, capsys: pytest.CaptureFixture[str]) -> None:
    """A running fleet in the home is used and not stopped, and results have KernelBench's form."""
    settings = load(home=fleet.config.home)
    with LocalKernelEvaluator(gpu="cpu", config=settings, **QUICK) as evaluator:
        right = evaluator.evaluate(REFERENCE, RIGHT)
        wrong = evaluator.evaluate(REFERENCE, WRONG, True)
        with pytest.raises(EvaluationFailed):
            evaluator.evaluate(BROKEN_REFERENCE, RIGHT)
        with pytest.raises(InvalidRequest, match="fortran"):
            evaluator.evaluate(REFERENCE, RIGHT, backend="fortran")
        untimed = evaluator.evaluate(REFERENCE, RIGHT, measure_performance=False)
    assert (right["compiled"], right["correctness"]) == (True, True)
    assert right["runtime_stats"]["num_trials"] == 5
    assert (wrong["compiled"], wrong["correctness"], wrong["runtime"]) == (True, False, -1.0)
    assert (untimed["correctness"], untimed["runtime"]) == (True, -1.0)
    assert capsys.readouterr().err.startswith("FAILED: wrong_values")
    evaluator.close()
    assert fleet.slots()


def is_up(config: Config) -> bool:
    """Return whether a fleet runs in a home."""
    return load(home=config.home).database_url is not None


@pytest.mark.services
def test_the_ephemeral_deployment(own_home: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Modal-like evaluator's `ephemeral` starts a fleet if there is none, and stops it."""
    for name in ("home", "scratch", "gpus", "cpu_slots"):
        monkeypatch.setenv(f"KQUEUE_{name.upper()}", str(getattr(own_home, name)))

    async def use() -> Any:
        evaluator = ModalKernelEvaluator(ModalEvaluatorConfig(gpu_type="cpu", deployment_mode="ephemeral"))
        try:
            return await evaluator.evaluate_single(REFERENCE, WRONG, "torch", 1)
        finally:
            await evaluator.close()

    assert asyncio.run(use())["metadata"]["category"] == "wrong_values"
    assert not is_up(own_home)
