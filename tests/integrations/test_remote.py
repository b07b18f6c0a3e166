"""The integrations in front of a fleet behind HTTP."""

from __future__ import annotations

import asyncio
import functools
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kqueue import AsyncRemoteClient, InvalidRequest, LaneUnavailable, RemoteClient
from kqueue.config import Config
from kqueue.integrations.modal_like import ModalEvaluatorConfig, ModalKernelEvaluator
from kqueue.integrations.rl import KernelEnv, reward
from kqueue.integrations.trace import KernelGuide
from tests.http.serving import Served
from tests.integrations.sources import BROKEN_REFERENCE, QUICK, REFERENCE, RIGHT, WRONG

SETTINGS: dict[str, Any] = QUICK | {"lane": "cpu", "score": "correctness"}


@pytest.fixture
def url(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The fleet's server; a token for it is in the environment."""
    with Served(config, tmp_path / "serve.log") as served:
        monkeypatch.setenv("KQUEUE_TOKEN", served.admin)
        yield served.url


def test_over_http(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluator, rewards, guide and environment do with a remote client what they do with the other."""
    for name in ("KQUEUE_DATABASE_URL", "KQUEUE_REDIS_URL"):
        monkeypatch.delenv(name)

    async def batches() -> tuple[list[Any], list[float | None], Any]:
        entry = {"ref_code": REFERENCE, "kernel_code": RIGHT, "backend": "torch", "num_correct_trials": 1}
        async with AsyncRemoteClient(url) as client:
            evaluator = ModalKernelEvaluator(ModalEvaluatorConfig(gpu_type="cpu"), client)
            slots = await evaluator.evaluate_batch([entry, entry | {"kernel_code": WRONG}, entry | {"backend": "x"}])
            away = ModalKernelEvaluator(ModalEvaluatorConfig(gpu_type="L40S"), client)
            [missing] = await away.evaluate_batch([entry])
            problems = [REFERENCE, REFERENCE, BROKEN_REFERENCE]
            return slots, await reward(problems, [RIGHT, WRONG, RIGHT], client=client, **SETTINGS), missing

    slots, rewards, missing = asyncio.run(batches())
    assert [slot["correctness"] if isinstance(slot, dict) else type(slot) for slot in slots] == [
        True,
        False,
        InvalidRequest,
    ]
    assert isinstance(missing, LaneUnavailable)
    assert rewards == [1.0, 0.0, None]

    guide = KernelGuide(
        gpu="cpu",
        num_correct_trials=1,
        backend="torch",
        score="correctness",
        connect=functools.partial(RemoteClient, url),
    )
    again = pickle.loads(pickle.dumps(guide))
    assert again.metric("task", RIGHT, REFERENCE) == guide.metric("task", RIGHT, REFERENCE) == 1.0
    guide.close()
    again.close()

    with RemoteClient(url) as client:
        env = KernelEnv([REFERENCE], client=client, **SETTINGS)
        env.reset()
        assert env.step(WRONG)[1] == 0.0
