"""Every integration with a real judge: one fleet, which the Modal-like evaluator starts and stops."""

from __future__ import annotations

import asyncio
import functools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kqueue import Client, EvaluationFailed, InvalidRequest, RemoteClient
from kqueue.config import Config, load
from kqueue.integrations.local import LocalKernelEvaluator
from kqueue.integrations.modal_like import ModalEvaluatorConfig, ModalKernelEvaluator
from kqueue.integrations.rl import KernelEnv, reward
from kqueue.integrations.trace import KernelGuide
from tests.cli.command import Cli
from tests.http.standin import Served
from tests.integrations.sources import BROKEN_REFERENCE, QUICK, REFERENCE, RIGHT, WRONG
from tests.services import with_schema

pytestmark = [pytest.mark.nightly, pytest.mark.services, pytest.mark.timeout(600)]


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a home without a running fleet, which the environment names."""
    with tempfile.TemporaryDirectory(prefix="kqueue-test-") as name:
        root = Path(name)
        root.chmod(0o711)
        (root / "home").mkdir(mode=0o700)
        with_schema(root / "home" / "postgres")
        settings = {"home": root / "home", "scratch": root / "scratch", "gpus": "none", "cpu_slots": 1, "reuse": False}
        for setting, value in settings.items():
            monkeypatch.setenv(f"KQUEUE_{setting.upper()}", str(value))
        yield root / "home"


def judge_everywhere(config: Config, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge kernels with each integration on the running fleet."""
    untimed = QUICK | {"num_perf_trials": 0}
    local = LocalKernelEvaluator(gpu="cpu", **QUICK)
    result = local.evaluate(REFERENCE, RIGHT)
    assert (result["compiled"], result["correctness"]) == (True, True)
    result = local.evaluate(REFERENCE, WRONG, True, measure_performance=False)
    assert (result["compiled"], result["correctness"], result["runtime"]) == (True, False, -1.0)
    with pytest.raises(EvaluationFailed):
        local.evaluate(BROKEN_REFERENCE, RIGHT)
    with pytest.raises(InvalidRequest, match="fortran"):
        local.evaluate(REFERENCE, RIGHT, backend="fortran")
    settings: dict[str, Any] = untimed | {"lane": "cpu", "score": "correctness"}
    problems = [REFERENCE, REFERENCE, BROKEN_REFERENCE]
    assert asyncio.run(reward(problems, [f"```python\n{RIGHT}```", WRONG, RIGHT], **settings)) == [1.0, 0.0, None]
    served = Served(config)
    monkeypatch.setenv("KQUEUE_TOKEN", served.admin)
    guide = KernelGuide(**untimed, gpu="cpu", score="correctness", connect=functools.partial(RemoteClient, served.url))
    score, feedback = guide.get_feedback("task", WRONG, REFERENCE)
    assert (score, "index [0, 0]: expected" in feedback) == (0.0, True)
    guide.close()
    with RemoteClient(served.url) as client:
        env = KernelEnv([REFERENCE], client=client, **settings)
        env.reset()
        assert env.step(RIGHT)[1] == 1.0
    served.close()
    for name in ("level1", "run"):
        (folder / name).mkdir()
    (folder / "level1" / "1_Scale.py").write_text(REFERENCE)
    (folder / "run" / "level_1_problem_1_sample_0_kernel.py").write_text(RIGHT)
    words = ("--problems", ".", "--generations", "run", "--backend", "torch", "--lane", "cpu")
    done = Cli(folder)("kernelbench", *words, "--checks", "1", "--calls", "5", "--json")
    assert (done.returncode, json.loads(done.stdout)["correct"]) == (0, 1), done.stderr
    with Client(config) as client:
        assert client.batch("run")[0].verdict().passed  # type: ignore[union-attr]


def test_every_integration(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`ephemeral` starts a fleet if there is none, all other integrations use it, and it ends with the evaluator."""
    evaluator = ModalKernelEvaluator(ModalEvaluatorConfig(gpu_type="cpu", deployment_mode="ephemeral"))
    try:
        result = asyncio.run(evaluator.evaluate_single(REFERENCE, WRONG, "torch", 1))
        assert result["metadata"]["category"] == "wrong_values"
        judge_everywhere(load(), tmp_path, monkeypatch)
        assert "FAILED: wrong_values" in capsys.readouterr().err
    finally:
        asyncio.run(evaluator.close())
    assert load(home=home).database_url is None
