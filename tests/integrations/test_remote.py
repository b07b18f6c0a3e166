"""The integrations with a fleet behind HTTP."""

from __future__ import annotations

import asyncio
import functools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from kqueue import AsyncRemoteClient, LaneUnavailable, RemoteClient
from kqueue.config import Config
from kqueue.errors import AccessRefused
from kqueue.integrations.modal_like import ModalEvaluatorConfig, ModalKernelEvaluator
from kqueue.integrations.rl import KernelEnv, reward
from kqueue.integrations.trace import KernelGuide
from tests.http.standin import Served
from tests.integrations.sources import BROKEN_REFERENCE, QUICK, REFERENCE, RIGHT, WRONG

SETTINGS: dict[str, Any] = QUICK | {"lane": "cpu", "score": "correctness"}


@pytest.fixture
def served(config: Config, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """Start a server for the fleet, whose settings are not in the environment."""
    for name in config.environment():
        monkeypatch.delenv(name)
    running = Served(config)
    yield running
    running.close()


@pytest.fixture
def url(served: Served, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the server's address, with its token in the environment."""
    monkeypatch.setenv("KQUEUE_TOKEN", served.admin)
    return served.url


def test_over_http(url: str) -> None:
    """Evaluator, rewards, guide and environment work the same with a remote client."""

    async def batches() -> tuple[list[Any], list[float | None]]:
        entry = {"ref_code": REFERENCE, "kernel_code": RIGHT, "backend": "torch", "num_correct_trials": 1}
        async with AsyncRemoteClient(url) as client:
            evaluator = ModalKernelEvaluator(ModalEvaluatorConfig(gpu_type="cpu"), client)
            slots = await evaluator.evaluate_batch([entry, entry | {"kernel_code": WRONG}, entry | {"backend": "x"}])
            away = ModalKernelEvaluator(ModalEvaluatorConfig(gpu_type="L40S", wait_for_gpu=False), client)
            with pytest.raises(LaneUnavailable, match="l40s"):
                await away.evaluate_batch([entry])
            problems = [REFERENCE, REFERENCE, BROKEN_REFERENCE]
            return slots, await reward(problems, [RIGHT, WRONG, RIGHT], client=client, **SETTINGS)

    slots, rewards = asyncio.run(batches())
    ends = [slot["metadata"].get("exception_type", slot["correctness"]) for slot in slots]
    assert ends == [True, False, "InvalidRequest"]
    assert rewards == [1.0, 0.0, None]

    settings = {"gpu": "cpu", "num_correct_trials": 1, "backend": "torch", "score": "correctness"}
    guide = KernelGuide(**settings, connect=functools.partial(RemoteClient, url))
    again = pickle.loads(pickle.dumps(guide))
    assert again.metric("task", RIGHT, REFERENCE) == guide.metric("task", RIGHT, REFERENCE) == 1.0
    guide.close()
    again.close()

    with RemoteClient(url) as client:
        env = KernelEnv([REFERENCE], client=client, **SETTINGS)
        env.reset()
        assert env.step(WRONG)[1] == 0.0


def test_the_evaluators_own_connection(monkeypatch: pytest.MonkeyPatch, served: Served) -> None:
    """A URL can replace a database, and only a token of kqueue is read from the named variable."""
    monkeypatch.setenv("KQUEUE_URL", served.url)

    async def category() -> str:
        evaluator = ModalKernelEvaluator(ModalEvaluatorConfig(gpu_type="cpu", modal_token_env="MY_TOKEN"))
        try:
            result = await evaluator.evaluate_single(REFERENCE, WRONG, "torch", 1)
        finally:
            await evaluator.close()
        return result["metadata"]["category"]

    for foreign in ("ak-of-modal", ""):
        monkeypatch.setenv("MY_TOKEN", foreign)
        with pytest.raises(AccessRefused):
            asyncio.run(category())
    monkeypatch.setenv("MY_TOKEN", served.admin)
    assert asyncio.run(category()) == "wrong_values"
    monkeypatch.setenv("MY_TOKEN", "ak-of-modal")
    monkeypatch.setenv("KQUEUE_TOKEN", served.admin)
    assert asyncio.run(category()) == "wrong_values"
