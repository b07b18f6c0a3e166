"""The evaluator that brings its own fleet."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kqueue import EvaluationFailed, InvalidRequest, LaneUnavailable
from kqueue.config import Config, load
from kqueue.integrations.local import LocalKernelEvaluator
from kqueue.integrations.modal_like import ModalEvaluatorConfig, ModalKernelEvaluator
from kqueue.local.fleet import LocalFleet
from tests.integrations.sources import BROKEN_REFERENCE, QUICK, REFERENCE, RIGHT, WRONG
from tests.waiting import until


@pytest.fixture
def own_home() -> Iterator[Config]:
    """Settings of a home in which no fleet runs."""
    with tempfile.TemporaryDirectory(prefix="kqueue-test-") as name:
        root = Path(name)
        root.chmod(0o711)
        yield load(home=root / "home", scratch=root / "scratch", gpus="none", cpu_slots=1)


def test_a_fleet_that_is_up_is_used(fleet: LocalFleet, capsys: pytest.CaptureFixture[str]) -> None:
    """A running fleet is found by its home, used, and left alone; results have KernelBench's form."""
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


def test_a_gpu_that_this_machine_lacks(fleet: LocalFleet) -> None:
    """It is a clear error, before a kernel is evaluated for which a caller could take it."""
    evaluator = LocalKernelEvaluator(gpu="L40S", config=load(home=fleet.config.home))
    with pytest.raises(LaneUnavailable, match=r"gpu\.l40s.*KQUEUE_GPU_FALLBACK"), evaluator:
        pass
    with pytest.raises(LaneUnavailable):
        evaluator.evaluate(REFERENCE, RIGHT)


def test_the_fleets_fallback(fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another GPU's name is no error where the fleet names a lane in its place; the result says so."""
    # A process has one connection to a fleet, with the settings of its first use.
    program = f"""
from kqueue.integrations.local import LocalKernelEvaluator
with LocalKernelEvaluator(gpu="L40S", **{QUICK!r}) as evaluator:
    metadata = evaluator.evaluate({REFERENCE!r}, {WRONG!r})["metadata"]
print(metadata["category"], metadata["lane"], metadata["lane_asked"])
"""
    monkeypatch.setenv("KQUEUE_HOME", str(fleet.config.home))
    monkeypatch.setenv("KQUEUE_GPU_FALLBACK", "cpu")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "wrong_values cpu gpu.l40s\n"), done.stderr


def is_up(config: Config) -> bool:
    """Whether a fleet runs in a home."""
    return load(home=config.home).database_url is not None


@pytest.mark.nightly
def test_it_brings_its_own_fleet(own_home: Config) -> None:
    """Started where none is up, kept for threads, let go when idle, started again by the next evaluation."""
    evaluator = LocalKernelEvaluator(gpu="cpu", idle_timeout=2.0, config=own_home, **QUICK)
    assert not is_up(own_home)
    with evaluator:
        assert is_up(own_home)
        # The thread that needs it first may end long before it.
        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(lambda _: evaluator.evaluate(REFERENCE, WRONG), range(2)))
        assert [result["metadata"]["category"] for result in results] == ["wrong_values"] * 2
        until(lambda: not is_up(own_home))
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(evaluator.evaluate, REFERENCE, RIGHT).result()["correctness"] is True
    evaluator.close()
    assert not is_up(own_home)


@pytest.mark.services
def test_the_ephemeral_deployment(own_home: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Modal-like evaluator's `ephemeral` brings a fleet where none is, and takes it along."""
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
