"""The adapters with the packages that `make adapters` installs."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kqueue import Client
from kqueue.config import Config
from tests.integrations.sources import BROKEN_REFERENCE, REFERENCE, RIGHT, SETTINGS, WRONG
from tests.packages import NEMO_GYM_FOLDER, needs
from tests.waiting import until

pytestmark = pytest.mark.nightly


@pytest.fixture
def verifiers(config: Config) -> Iterator[None]:
    """Load verifiers, and close the client that its tasks share in a process."""
    needs("verifiers")
    yield
    from kqueue.integrations.common import SHARED_ASYNC

    if (client := SHARED_ASYNC.take()) is not None:
        asyncio.run(client.close())


@pytest.fixture
def served(kq: Client) -> Iterator[str]:
    """Return the URL of an OpenEnv server of two problems, the second of which fails."""
    needs("openenv")
    import uvicorn
    from openenv.core.env_server import create_app

    from kqueue.integrations.openenv import KernelAction, KernelEnvironment, KernelObservation

    made = partial(KernelEnvironment, [REFERENCE, BROKEN_REFERENCE], max_turns=2, client=kq, **SETTINGS)
    app = create_app(made, KernelAction, KernelObservation, env_name="kqueue")
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started, what="the server")
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def test_openenv_over_its_own_client(served: str) -> None:
    """OpenEnv's client gets observations, rewards, the end, and None if nothing is known."""
    from openenv.core import GenericEnvClient

    async def episode() -> list[Any]:
        async with GenericEnvClient(base_url=served, message_timeout_s=120) as env:
            told = [
                await env.reset(seed=3, problem=0),
                await env.step({"kernel": WRONG}),
                await env.step({"kernel": RIGHT}),
            ]
            told += [await env.reset(problem=1), await env.step({"kernel": RIGHT})]
            return [*told, await env.state()]

    begun, wrong, right, other, unknown, state = asyncio.run(episode())
    assert "class Model(nn.Module)" in begun.observation["text"]
    assert (wrong.reward, wrong.done, wrong.observation["turn"]) == (0.0, False, 1)
    assert wrong.observation["verdict"]["category"] == "wrong_values"
    assert (right.reward, right.done, right.observation["correct"]) == (1.0, True, True)
    assert (other.reward, other.done) == (None, False)
    assert (unknown.reward, unknown.done, unknown.observation["turn"]) == (None, False, 0)
    assert unknown.observation["text"].startswith("NOT JUDGED")
    assert state["step_count"] == 0


def test_verifiers_scores_replies(verifiers: None, tmp_path: Path) -> None:
    """Each task of a file is rewarded by its verdict, and a failure of the fleet raises instead of a reward."""
    import verifiers.v1 as vf

    from kqueue.integrations.verifiers import KernelTask, KernelTaskConfig, KernelTaskset, KernelTasksetConfig

    (tmp_path / "level1").mkdir()
    (tmp_path / "level1" / "1_Scale.py").write_text(REFERENCE)
    (tmp_path / "level1" / "2_Broken.py").write_text(BROKEN_REFERENCE)
    settings = KernelTaskConfig(
        backend="torch", lane="cpu", score="correctness", num_correct_trials=1, num_perf_trials=0
    )
    scale, broken = KernelTaskset(KernelTasksetConfig(problems=tmp_path, task=settings))
    assert isinstance(scale, KernelTask)
    assert (scale.data.name, broken.data.name) == ("1_Scale", "2_Broken")
    assert "class Model(nn.Module)" in scale.data.prompt_text

    async def scored(task: Any, reply: str) -> float:
        trace = vf.Trace(
            agent=vf.AgentInfo(config=vf.AgentConfig()), task=vf.TraceTask(type="KernelTask", data=task.data)
        )
        trace.root_reply = reply
        await task.score(trace)
        return trace.reward

    assert asyncio.run(scored(scale, f"```python\n{RIGHT}```")) == 1.0
    assert asyncio.run(scored(scale, WRONG)) == 0.0
    assert asyncio.run(scored(scale, "")) == 0.0
    with pytest.raises(vf.TaskError, match="reference_error"):
        asyncio.run(scored(broken, RIGHT))


#: Verifies the replies in stdin with NeMo-Gym's application, and prints each reward, or the status without a reward.
NEMO_GYM = """
import json, sys
from fastapi.testclient import TestClient
from nemo_gym.server_utils import ServerClient
from kqueue.integrations.nemo_gym import KernelResourcesServer, KernelResourcesServerConfig

config, bodies = json.load(sys.stdin)
own = {"host": "127.0.0.1", "port": 0, "entrypoint": "app.py", "name": "kernels", "domain": "coding"}
settings = KernelResourcesServerConfig(**own, **config)
server = KernelResourcesServer(config=settings, server_client=ServerClient.model_construct())
with TestClient(server.setup_webserver(), raise_server_exceptions=False) as client:
    answers = [client.post("/verify", json=body) for body in bodies]
print(json.dumps([answer.json()["reward"] if answer.is_success else answer.status_code for answer in answers]))
"""


@pytest.mark.skipif(sys.version_info < (3, 12), reason="NeMo-Gym needs Python 3.12")
def test_nemo_gym_verifies_replies(config: Config) -> None:
    """NeMo-Gym's server answers with rewards, and with an error and no reward if nothing is known."""
    needs("nemo_gym", NEMO_GYM_FOLDER)
    fields = {"id": "r", "created_at": 0, "model": "m", "object": "response", "parallel_tool_calls": False}
    fields |= {"tool_choice": "auto", "tools": []}

    def body(answer: str, reference: str) -> dict[str, Any]:
        text = {"type": "output_text", "text": answer, "annotations": []}
        message = {"id": "o", "type": "message", "role": "assistant", "status": "completed", "content": [text]}
        response = fields | {"output": [message]}
        return {"reference": reference, "responses_create_params": {"input": []}, "response": response}

    bodies = [body(f"```python\n{RIGHT}```", REFERENCE), body(WRONG, REFERENCE), body(RIGHT, BROKEN_REFERENCE)]
    done = subprocess.run(
        [sys.executable, "-c", NEMO_GYM],
        input=json.dumps([SETTINGS, bodies]),
        env=os.environ | {"PYTHONPATH": NEMO_GYM_FOLDER},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [1.0, 0.0, 500]
