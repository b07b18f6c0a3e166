"""Rewards for batches, and the environment with several turns."""

from __future__ import annotations

import asyncio
import warnings
from typing import Any

import pytest

from kqueue import AsyncClient, Client, EvaluationFailed, InvalidRequest, LaneUnavailable, Request
from kqueue.config import Config
from kqueue.integrations.rl import KernelEnv, reward
from kqueue.kernelbench import request_of
from tests.integrations.sources import BROKEN_REFERENCE, QUICK, REFERENCE, RIGHT, SETTINGS, WRONG
from tests.packages import needs


def rewards(problems: Any, completions: Any, **changes: Any) -> list[float | None]:
    """Return the rewards on the `cpu` lane."""
    return asyncio.run(reward(problems, completions, **SETTINGS | changes))


def again(kernel: str, key: str) -> Request:
    """Return the request that :func:`rewards` sends under a key."""
    return request_of(REFERENCE, kernel, **QUICK, lane="cpu", purpose="train", idempotency_key=key)


def test_rewards_of_a_batch(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    """Rewards are in order for any form of answer: None if the problem failed, 0 if the kernel did."""
    turns = [{"role": "user", "content": "faster!"}, {"role": "assistant", "content": f"```\n{RIGHT}\n```"}]
    completions = [WRONG, f"Sure.\n```python\n{RIGHT}\n```", RIGHT, turns, "", "I cannot do that.", []]
    problems = [REFERENCE, REFERENCE, BROKEN_REFERENCE, REFERENCE, REFERENCE, REFERENCE, REFERENCE]
    with caplog.at_level("INFO", "kqueue.integrations.rl"):
        assert rewards(problems, completions) == [0.0, 1.0, None, 1.0, 0.0, 0.0, 0.0]
    assert "answer 1: taken: block 1 of 1 (python), lines 3-" in caplog.text
    assert rewards(REFERENCE, []) == []
    # A lane without workers yields no information on the kernels.
    assert rewards(REFERENCE, [RIGHT, "", WRONG], lane="gpu.l40s") == [None, 0.0, None]
    assert rewards(REFERENCE, [WRONG, RIGHT], score="speedup") == [0.0, 2.0]
    caplog.clear()
    assert rewards(REFERENCE, [WRONG, RIGHT], score="speedup", purpose="check") == [0.0, None]
    assert "1 of 2 rewards are masked because these kernels have a verdict without a score" in caplog.text
    assert "have no verdict" not in caplog.text


def test_too_late_is_a_mask(config: Config) -> None:
    """An evaluation without a verdict in time is cancelled and its reward is None."""
    slow = f"{RIGHT}# until /nowhere/\n"

    async def both() -> tuple[list[float | None], Any]:
        async with AsyncClient(config) as client:
            found = await reward(REFERENCE, [slow], client=client, timeout=1.0, run="late", **SETTINGS)
            ticket = await client.submit(again(slow, "late/0"))
            return found, await ticket.wait(60)

    found, verdict = asyncio.run(both())
    assert found == [None]
    assert verdict.category == "cancelled"


def test_a_batch_again(kq: Client) -> None:
    """The same answers under a run's name get the same verdicts, and other answers are refused."""
    assert rewards(REFERENCE, [RIGHT, WRONG], run="step-7") == [1.0, 0.0]
    assert not kq.submit(again(RIGHT, "step-7/0")).created
    assert rewards(REFERENCE, [RIGHT, WRONG], run="step-7") == [1.0, 0.0]
    with pytest.raises(InvalidRequest, match="step-7/0"):
        rewards(REFERENCE, [WRONG, WRONG], run="step-7")


def test_wrong_arguments_are_raised(config: Config) -> None:
    """Invalid arguments raise instead of giving a reward."""
    for problems, changes, named in (
        ([REFERENCE], {}, "1 for 2"),
        ([REFERENCE, ""], {}, "problem"),
        (REFERENCE, {"backend": "fortran"}, "fortran"),
        (REFERENCE, {"lane": "tpu"}, "tpu"),
        (REFERENCE, {"colour": "red"}, "colour"),
    ):
        with pytest.raises(InvalidRequest, match=named):
            rewards(problems, [RIGHT, WRONG], **changes)
    with pytest.raises(InvalidRequest, match="list of answers"):
        rewards(REFERENCE, RIGHT)
    for problems, changes in ([], {}), ([""], {}), ([REFERENCE], {"max_turns": 0}), ([REFERENCE], {"backend": "x"}):
        with pytest.raises(InvalidRequest):
            KernelEnv(problems, **SETTINGS | changes)


def test_an_episode(kq: Client) -> None:
    """Each turn is judged with an observation, and the episode ends at the turn limit or a reached target."""
    env = KernelEnv([REFERENCE], max_turns=2, client=kq, **SETTINGS)
    task, info = env.reset(seed=1)
    assert "class Model(nn.Module)" in task
    assert (info["turn"], info["best"], info["verdict"]) == (0, None, None)
    text, score, terminated, truncated, info = env.step(WRONG)
    assert text.startswith("FAILED: wrong_values")
    assert (score, terminated, truncated, info["turn"], info["correct"]) == (0.0, False, False, 1, False)
    assert info["verdict"]["category"] == "wrong_values"
    text, score, terminated, truncated, info = env.step(f"```python\n{RIGHT}```")
    assert text.startswith("CORRECT")
    assert (score, terminated, truncated, info["best"], info["correct"]) == (1.0, False, True, 1.0, True)
    with pytest.raises(InvalidRequest, match="reset"):
        env.step(RIGHT)
    env.close()
    # Reaching a target terminates the episode.
    env = KernelEnv([REFERENCE], target=1.0, client=kq, **SETTINGS)
    env.reset()
    assert env.step("no kernel")[1:4] == (0.0, False, False)
    assert env.step(RIGHT)[1:4] == (1.0, True, False)
    with pytest.raises(InvalidRequest, match="reset"):
        env.step(RIGHT)


def test_a_failure_of_others_is_no_turn(kq: Client) -> None:
    """A turn without a verdict on the kernel, or without workers, does not count."""
    env = KernelEnv([BROKEN_REFERENCE, REFERENCE], max_turns=1, client=kq, **SETTINGS)
    env.reset(options={"problem": 0})
    for _ in range(2):
        with pytest.raises(EvaluationFailed):
            env.step(RIGHT)
    env.reset(options={"problem": 1})
    assert env.step(RIGHT)[1] == 1.0
    away = KernelEnv([REFERENCE], max_turns=1, client=kq, **SETTINGS | {"lane": "gpu.l40s"})
    away.reset()
    with pytest.raises(LaneUnavailable):
        away.step(RIGHT)


def test_problems_are_chosen_by_the_seed(config: Config) -> None:
    """The same seed gives the same problems, and an option names one."""
    env = KernelEnv([f"{REFERENCE}\n# {number}\n" for number in range(20)], **SETTINGS)
    first = [env.reset(seed=5)[1]["problem"], *(env.reset()[1]["problem"] for _ in range(5))]
    assert first == [env.reset(seed=5)[1]["problem"], *(env.reset()[1]["problem"] for _ in range(5))]
    assert len(set(first)) > 1
    assert env.reset(options={"problem": 13})[1]["problem"] == 13
    for wrong in (20, -1, "3"):
        with pytest.raises(InvalidRequest, match="problem: "):
            env.reset(options={"problem": wrong})


def test_gymnasium_checks_it(config: Config) -> None:
    """With gymnasium installed the environment passes gymnasium's checks."""
    needs("gymnasium")
    import gymnasium
    from gymnasium.utils.env_checker import check_env

    env = KernelEnv([REFERENCE], **SETTINGS)
    assert isinstance(env, gymnasium.Env)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_env(env, skip_render_check=True)
    env.close()
