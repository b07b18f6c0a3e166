"""The adapters with the packages that `make adapters` installs."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kqueue.config import Config
from tests.integrations.sources import BROKEN_REFERENCE, REFERENCE, RIGHT, SETTINGS, WRONG
from tests.packages import NEMO_GYM_FOLDER, needs

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).parents[2]


@pytest.fixture
def verifiers(config: Config) -> Iterator[None]:
    """Load verifiers, and close the client that its tasks share in a process."""
    needs("verifiers")
    yield
    from kqueue.integrations.common import SHARED_ASYNC

    if (client := SHARED_ASYNC.take()) is not None:
        asyncio.run(client.close())


#: Serves the two problems in stdin with OpenEnv, talks to the server by OpenEnv's client and by HTTP, and prints all.
OPENENV = """
import asyncio, json, sys, threading, time
from functools import partial
import httpx, uvicorn
from openenv.core import GenericEnvClient
from openenv.core.env_server import create_app
from kqueue.integrations.openenv import KernelAction, KernelEnvironment, KernelObservation

problems, wrong, right, settings = json.load(sys.stdin)
made = partial(KernelEnvironment, problems, max_turns=2, **settings)
app = create_app(made, KernelAction, KernelObservation, "kqueue")
server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
threading.Thread(target=server.run).start()
while not server.started:
    time.sleep(0.05)
url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

async def episodes():
    async with GenericEnvClient(base_url=url, message_timeout_s=120) as env:
        yield await env.reset(seed=3, split="train", index=0)
        yield await env.step({"kernel": wrong})
        yield await env.step({"kernel": right})
        yield await env.reset(problem=1)
        yield await env.step({"kernel": right})

async def told():
    return [[one.observation, one.reward, one.done] async for one in episodes()]

tasks = [httpx.get(f"{url}/kqueue/splits").json()]
for route, more in ("num_tasks", {}), ("tasks", {}), ("task", {"index": 1}), ("task_range", {"start": 1}):
    tasks.append(httpx.post(f"{url}/kqueue/{route}", json={"split": "train", **more}).json())
try:
    print(json.dumps([asyncio.run(told()), tasks]))
finally:
    server.should_exit = True
"""


def test_openenv_over_its_own_client(config: Config) -> None:
    """OpenEnv's client gets observations, rewards, the end, and None if nothing is known. It lists the problems."""
    needs("openenv", NEMO_GYM_FOLDER)
    done = subprocess.run(
        [sys.executable, "-c", OPENENV],
        input=json.dumps([[REFERENCE, BROKEN_REFERENCE], WRONG, RIGHT, SETTINGS]),
        env=os.environ | {"PYTHONPATH": NEMO_GYM_FOLDER}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [begun, wrong, right, other, unknown], tasks = json.loads(done.stdout)
    assert "class Model(nn.Module)" in begun[0]["text"]
    assert (wrong[1:], wrong[0]["turn"], wrong[0]["verdict"]["category"]) == ([0.0, False], 1, "wrong_values")
    assert (right[1:], right[0]["correct"]) == ([1.0, True], True)
    assert other[1:] == [None, False]
    assert (unknown[1:], unknown[0]["turn"], unknown[0]["text"][:10]) == ([None, False], 0, "NOT JUDGED")
    one = {"index": 1}
    assert tasks == [
        [{"name": "train", "type": "train"}], {"num_tasks": 2}, {"tasks": [{"index": 0}, one], "env_name": "kqueue"},
        {"task": one}, {"tasks": [one]},
    ]  # fmt: skip


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


def door(package: str, sign: str, **names: Any) -> dict[str, Any]:
    """Run the documented lines for a package, at most 15, on the lane cpu with some names. Return what they define."""
    needs(package)
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "examples" / "trainers.md").read_text(), re.DOTALL)
    [lines] = [one for one in examples if sign in one]
    assert len([*filter(str.strip, lines.splitlines())]) <= 15, package
    found = {"PROBLEM": REFERENCE, "SETTINGS": SETTINGS, **names}
    exec(lines.replace('backend="triton"', "**SETTINGS"), found)
    return found


def test_trl_masks_unknown_rewards(config: Config) -> None:
    """TRL's trainer takes rewards from the documented function, and none of what is unknown."""
    kernels = door("trl", "# TRL")["kernels"]
    from accelerate import PartialState
    from trl import GRPOTrainer

    PartialState(cpu=True)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    lists = {"reward_funcs": [kernels], "reward_processing_classes": [None], "reward_func_names": ["kernels"]}
    trainer = Mock(**lists, async_loop=loop, environments=None)
    trainer.accelerator = Mock(device="cpu", gather=lambda one: one)
    trainer.args.report_to = []
    references, answers = [REFERENCE, REFERENCE, BROKEN_REFERENCE], [RIGHT, WRONG, RIGHT]
    try:
        rows = [{"reference": one} for one in references]
        rewards = GRPOTrainer._calculate_rewards(trainer, rows, ["p"] * 3, answers, [[]] * 3)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
    assert [*map(str, rewards.flatten().tolist())] == ["1.0", "0.0", "nan"]


def test_skyrl_gym_steps(config: Config) -> None:
    """SkyRL-gym's environment shows the task, then rewards two turns."""
    env = door("skyrl_gym", "skyrl_gym")["Kernels"]({}, {"reference": REFERENCE})
    [*_, asked], _ = env.init([{"role": "system", "content": "s"}])
    assert "class Model(nn.Module)" in asked["content"]
    wrong, right = env.step(WRONG), env.step(RIGHT)
    assert ((wrong["reward"], wrong["done"]), (right["reward"], right["done"])) == ((0.0, False), (1.0, True))
    env.close()


def test_inspect_ai_scores_a_sample(config: Config) -> None:
    """inspect_ai's score is the reward, and an unknown one is the sample's error."""
    needs("inspect_ai")
    from inspect_ai.scorer import Target

    score = door("inspect_ai", "inspect_ai")["kernel"]()

    async def scored(reference: str, answer: str) -> float:
        return (await score(Mock(output=Mock(completion=answer)), Target(reference))).value

    assert [asyncio.run(scored(REFERENCE, one)) for one in (RIGHT, WRONG)] == [1.0, 0.0]
    with pytest.raises(RuntimeError, match="failed"):
        asyncio.run(scored(BROKEN_REFERENCE, RIGHT))


def test_gepa_finds_the_right_kernel(config: Config) -> None:
    """GEPA's search takes the score and the feedback."""
    needs("gepa")
    from gepa.optimize_anything import EngineConfig, GEPAConfig, ReflectionConfig

    asked: list[str] = []

    def model(prompt: Any) -> str:
        asked.append(str(prompt))
        return f"```\n{RIGHT}```"

    config_ = GEPAConfig(engine=EngineConfig(max_metric_calls=4), reflection=ReflectionConfig(reflection_lm=model))
    assert door("gepa", "gepa", START=WRONG, CONFIG=config_)["found"].best_candidate.strip() == RIGHT.strip()
    assert "WRONG_VALUES" in asked[0].upper()


def test_optuna_and_shinka_share_a_judge(config: Config, tmp_path: Path) -> None:
    """Optuna's objective and ShinkaEvolve's evaluator take the score of a kernel."""
    study = door("optuna", "optuna", TEMPLATE=RIGHT.replace("x * 2 + 1", "x * 2 + BLOCK"))["study"]
    assert study.best_params == {"block": 1}
    main = door("optuna", "def main")["main"]
    for name, kernel in ("right", RIGHT), ("wrong", WRONG):
        (tmp_path / "kernel.py").write_text(kernel)
        main(str(tmp_path / "kernel.py"), str(tmp_path))
        correct = json.loads((tmp_path / "correct.json").read_text())["correct"]
        score = json.loads((tmp_path / "metrics.json").read_text())["combined_score"]
        assert (correct, score) == (name == "right", float(name == "right"))


def test_kernelagents_test_ends_with_the_result(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test of KernelAgent's worker fails for a kernel that is not right, with the feedback."""
    monkeypatch.chdir(tmp_path)
    for line in "return x * 2 + 1", "return x * 2":
        Path("kernel.py").write_text(f"def kernel_function(x):\n    {line}\n")
        with nullcontext() if "1" in line else pytest.raises(SystemExit, match="values"):
            door("optuna", "kernel_function")


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
