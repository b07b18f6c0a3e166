"""The adapters for verl, OpenEvolve and KernelBench, with their packages where those are installed."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kqueue import AsyncClient, EvaluationFailed, InvalidRequest
from kqueue.config import Config
from kqueue.integrations.common import SHARED, Judging, judge_async
from kqueue.integrations.kernelbench import eval_kernel_against_ref
from kqueue.integrations.verl import compute_score
from tests.integrations.sources import BROKEN_REFERENCE, NO_KERNEL, REFERENCE, RIGHT, SETTINGS, WRONG
from tests.packages import needs


@pytest.fixture(autouse=True)
def _closed(config: Config) -> Iterator[None]:
    """Close the clients that the adapters share in a process."""
    yield
    if (client := SHARED.take()) is not None:
        client.close()


def test_compute_score(config: Config) -> None:
    """Verl's function returns a score for a kernel or an answer without one, and raises if nothing is known."""
    assert compute_score("kernels", f"```python\n{RIGHT}```", REFERENCE, {}, **SETTINGS) == 1.0
    assert compute_score("kernels", WRONG, REFERENCE, None, reward_router_address="a", **SETTINGS) == 0.0
    assert compute_score("kernels", "I cannot.", REFERENCE, **SETTINGS) == 0.0
    with pytest.raises(EvaluationFailed):
        compute_score("kernels", RIGHT, BROKEN_REFERENCE, **SETTINGS)
    with pytest.raises(InvalidRequest):
        compute_score("kernels", RIGHT, REFERENCE, **SETTINGS | {"lane": "gpu.l40s"})


@pytest.mark.nightly
def test_verl_calls_it(config: Config) -> None:
    """Verl's loader finds the function by its page's overrides, and its reward manager returns the reward or raises."""
    needs("verl")
    import numpy as np
    import torch
    from hydra import compose, initialize_config_module
    from tensordict import TensorDict
    from verl import DataProto
    from verl.trainer.ppo.reward import load_reward_manager

    own, given = "reward.custom_reward_function", ", ".join(f"{name}: {value}" for name, value in SETTINGS.items())
    overrides = [f"{own}.path=pkg://kqueue.integrations.verl", f"+{own}.reward_kwargs={{{given}}}"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config_of_verl = compose("ppo_trainer", overrides)

    async def reward(answer: str, reference: str) -> dict[str, Any]:
        manager = load_reward_manager(config_of_verl, SimpleNamespace(decode=lambda *_, **__: answer))
        ones = torch.ones(1, 4, dtype=torch.long)
        batch = TensorDict({"responses": ones, "attention_mask": ones}, batch_size=[1])
        row = {"data_source": "kernels", "reward_model": {"ground_truth": reference}, "extra_info": {}}
        columns = {name: np.array([value], dtype=object) for name, value in row.items()}
        return await manager.run_single(DataProto(batch=batch, non_tensor_batch=columns))

    assert asyncio.run(reward(RIGHT, REFERENCE))["reward_score"] == 1.0
    assert asyncio.run(reward(WRONG, REFERENCE))["reward_score"] == 0.0
    with pytest.raises(EvaluationFailed):
        asyncio.run(reward(RIGHT, BROKEN_REFERENCE))


@pytest.mark.nightly
def test_openevolve_evaluates_with_it(config: Config, tmp_path: Path) -> None:
    """OpenEvolve's evaluator gets metrics and feedback, tries again if nothing is known, and then gets no score."""
    needs("openevolve")
    from openevolve.config import EvaluatorConfig
    from openevolve.evaluator import Evaluator

    def evaluated(reference: str, program: str) -> tuple[dict[str, Any], dict[str, Any]]:
        (tmp_path / "problem.py").write_text(reference)
        file = tmp_path / "evaluator.py"
        file.write_text(
            "from kqueue.integrations.openevolve import evaluator\n"
            f"evaluate = evaluator({str(tmp_path / 'problem.py')!r}, **{SETTINGS!r})\n"
        )
        evaluator = Evaluator(EvaluatorConfig(cascade_evaluation=False, max_retries=1, timeout=60), str(file))
        return asyncio.run(evaluator.evaluate_program(program, "p")), evaluator.get_pending_artifacts("p") or {}

    metrics, artifacts = evaluated(REFERENCE, RIGHT)
    assert metrics == {"combined_score": 1.0, "correct": 1.0, "speedup": 2.0, "runtime_ms": 0.5}
    assert artifacts["feedback"].startswith("CORRECT")
    metrics, artifacts = evaluated(REFERENCE, WRONG)
    assert metrics == {"combined_score": 0.0, "correct": 0.0}
    assert artifacts["feedback"].startswith("FAILED: wrong_values")
    assert evaluated(REFERENCE, "")[0]["combined_score"] == 0.0
    metrics, artifacts = evaluated(BROKEN_REFERENCE, RIGHT)
    assert "combined_score" not in metrics
    assert "reference_error" in artifacts["stderr"]


def test_judge_async(config: Config) -> None:
    """The adapters of servers get a score for a kernel or an answer without one, and an error if nothing is known."""

    async def scores() -> list[float]:
        async with AsyncClient(config) as client:
            ask = partial(judge_async, client, settings=Judging(**SETTINGS))
            with pytest.raises(EvaluationFailed):
                await ask(BROKEN_REFERENCE, RIGHT)
            return [await ask(REFERENCE, answer) for answer in (f"```python\n{RIGHT}```", WRONG, NO_KERNEL)]

    assert asyncio.run(scores()) == [1.0, 0.0, 0.0]


def test_kernelbenchs_function(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    """The function has KernelBench's parameters in order, its result's attributes, and raises without a result."""
    names = "original_model_src custom_model_src seed_num num_correct_trials num_perf_trials measure_performance "
    names += "timing_method verbose build_dir device backend precision check_for_excessive_speedup "
    names += "excessive_speedup_threshold"
    parameters = list(inspect.signature(eval_kernel_against_ref).parameters.values())
    assert [one.name for one in parameters[:-1]] == names.split()
    assert [one.default for one in parameters[2:9]] == [42, 1, 10, False, "cuda_event", False, None]
    ask = {"backend": "torch", "lane": "cpu", "precision": "torch.float32"}
    right = eval_kernel_against_ref(REFERENCE, RIGHT, 42, 1, 10, True, device=0, verbose=True, **ask)
    assert (right.compiled, right.correctness, right.runtime, right.ref_runtime) == (True, True, 0.5, 1.0)
    assert right.runtime_stats["num_trials"] == 10
    assert right.metadata["timing_method"] == "cuda_event"
    assert "CORRECT" in capsys.readouterr().err
    fast = eval_kernel_against_ref(REFERENCE, RIGHT, measure_performance=True, excessive_speedup_threshold=1.5, **ask)
    assert fast.metadata["excessive_speedup"] is True
    wrong = eval_kernel_against_ref(REFERENCE, WRONG, **ask)
    assert (wrong.compiled, wrong.correctness, wrong.runtime, wrong.runtime_stats) == (True, False, -1.0, {})
    with pytest.raises(EvaluationFailed):
        eval_kernel_against_ref(BROKEN_REFERENCE, RIGHT, **ask)
