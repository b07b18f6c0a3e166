"""The evaluator with a fleet behind HTTP. test_real.py has the other integrations there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from kqueue.config import Config
from kqueue.errors import AccessRefused
from kqueue.integrations import rl
from kqueue.integrations.modal_like import ModalEvaluatorConfig, ModalKernelEvaluator
from kqueue.integrations.trace import KernelGuide
from tests.http.standin import Served
from tests.integrations.sources import REFERENCE, SETTINGS, WRONG


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, config: Config) -> Iterator[Served]:
    """Serve the fleet over HTTP, and name nothing but its URL in the environment."""
    for name in config.environment():
        monkeypatch.delenv(name)
    served = Served(config)
    monkeypatch.setenv("KQUEUE_URL", served.url)
    yield served
    served.close()


def test_the_evaluators_own_connection(monkeypatch: pytest.MonkeyPatch, served: Served) -> None:
    """A URL can replace a database, and only a token of kqueue is read from the named variable."""

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


def test_rewards_and_guides_with_a_url_alone(monkeypatch: pytest.MonkeyPatch, served: Served) -> None:
    """They need no more than KQUEUE_URL with a token in it."""
    monkeypatch.setenv("KQUEUE_URL", served.url.replace("://", f"://x:{served.admin}@"))
    assert asyncio.run(rl.reward(REFERENCE, [WRONG], **SETTINGS)) == [0.0]
    environment = rl.KernelEnv([REFERENCE], max_turns=1, **SETTINGS)
    environment.reset(seed=0)
    assert environment.step(WRONG)[1] == 0.0
    environment.close()
    guide = KernelGuide(gpu="cpu", backend="torch", score="correctness")
    assert guide.get_feedback("", WRONG, REFERENCE)[0] == 0.0
    guide.close()
