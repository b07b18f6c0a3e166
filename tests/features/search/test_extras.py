"""The extra `search`: LiteLLM with a model server on loopback, and Weights & Biases offline."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from kqueue.errors import ProposerFailed
from kqueue.features.search.plan import Plan
from kqueue.features.search.proposers import Model, Question
from kqueue.features.search.results import WandbWatcher
from kqueue.states import SearchState
from kqueue.store.searches import Proposal, Run, Step
from tests.packages import needs
from tests.receiver import Answer, receiver
from tests.waiting import until

QUESTION = Question("run", 1, 1, "p", "torch", "k", {}, "f", None, "Write a kernel.")
pytestmark = pytest.mark.nightly
NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, str], list[Any]]]:
    """Start a server with OpenAI's protocol that answers with a status and a text, and records the requests."""
    servers = ExitStack()

    def start(status: int, answer: str) -> list[Any]:
        asked: list[Any] = []

        def completed(_: object, body: bytes) -> Answer:
            asked.append(json.loads(body))
            message = {"role": "assistant", "content": answer}
            good = {"id": "1", "object": "chat.completion", "created": 1, "model": "stub"}
            good["choices"] = [{"index": 0, "finish_reason": "stop", "message": message}]
            good["usage"] = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            content = json.dumps(good if status == 200 else {"error": {"message": answer}}).encode()
            return status, {"Content-Type": "application/json"}, content

        monkeypatch.setenv("OPENAI_API_BASE", f"{servers.enter_context(receiver(completed))}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        return asked

    with servers:
        yield start


def test_litellm_asks_the_model_the_prompt(model: Callable[[int, str], list[Any]]) -> None:
    """The proposal is the model's answer, and a summary is requested the same way."""
    needs("litellm")
    asked = model(200, "```python\nclass ModelNew: ...\n```")
    proposer = Model("openai/stub", answer_s=60)
    assert proposer.propose(QUESTION) == "```python\nclass ModelNew: ...\n```"
    assert asked[0]["messages"] == [{"role": "user", "content": "Write a kernel."}]
    proposer.summarize("problem", "- it failed")
    assert "- it failed" in asked[1]["messages"][0]["content"]

    # A refusal and an empty answer are failures of the proposer, in one line.
    for status, answer, says in ((401, "wrong key", "wrong key"), (200, "", "answered nothing")):
        model(status, answer)
        with pytest.raises(ProposerFailed, match=says) as failed:
            Model("openai/stub", answer_s=60).propose(QUESTION)
        assert "\n" not in str(failed.value)


def test_wandb_offline_keeps_the_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with the search's name and id has the best of each reported step, without a network."""
    needs("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    plan = Plan(problem="p", kernel="k", backend="torch", proposer="recorded", given="d", log_frequency=2)
    run = Run(UUID(int=7), "mine", {}, SearchState.RUNNING, NOW, None)
    best = Proposal(
        *(0, 0, None, None, "", "k", None, None, "passed", "", 4.0, 2.0, {"inverse_runtime": 250.0}, "", None, NOW)
    )
    watcher = WandbWatcher(run, plan)
    for number in range(3):
        watcher.step(Step(number, None, None, 0, None, NOW, NOW), {0: best})
    own = watcher._run
    assert (own.name, own.id, own.project) == ("mine", UUID(int=7).hex, "kqueue")
    assert "problem" not in dict(own.config)
    assert own.summary["best/inverse_runtime"] == 250.0
    watcher.finish()
    [file] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    # A separate process writes, possibly later.
    until(lambda: b"inverse_runtime" in file.read_bytes(), what="the points")
