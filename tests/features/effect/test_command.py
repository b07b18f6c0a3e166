"""`kqueue effect` without a fleet, on models of transformers and on a small model that takes their place."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kqueue.config import load
from kqueue.contract import Request
from kqueue.features.effect import effects
from kqueue.judging import LocalJudge
from tests.cli.command import Cli
from tests.cli.machine import *  # noqa: F403
from tests.features.effect.samples import KERNEL, NORM, recipe
from tests.packages import ADAPTERS_FOLDER, needs

pytestmark = pytest.mark.slow("starts a judge")
LAYERS = '64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8'
#: The sizes in recipes, and the sizes that make their models small.
SMALL = {
    '2048, "intermediate_size": 5632, "num_hidden_layers": 8, "num_attention_heads": 32': LAYERS,
    '1024, "intermediate_size": 3584, "num_hidden_layers": 6, "num_attention_heads": 16': LAYERS,
    "vocab_size=32000": "vocab_size=200",
    '"tokens": 2048': '"tokens": 64',
    '"past": 512': '"past": 8',
    '"image_size": 224}': '"image_size": 32, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}',
    '"images": 64': '"images": 4',
    '"images": 1': '"images": 2',
}
#: Scale and shift of a layer norm.
BOTH = "self.both = torch.nn.ParameterList(torch.randn(width) for _ in range(2))"


def measure(cli: Cli, kernel: str, model: str, problem: str = NORM, status: int = 0) -> effects.Effect:
    for name, text in (("kernel.py", kernel), ("problem.py", problem), ("model.py", model)):
        cli.write(name, text)
    quick = ("--device", "cpu", "--rounds", "1", "--checks", "1", "--calls", "5", "--set", "timing.purpose=train")
    arguments = ("kernel.py", "--problem", "problem.py", "--model", "model.py", "--json")
    done = cli("effect", *arguments, *quick, "--set", "limits.host_memory_bytes=402653184")
    assert done.returncode == status, done.stdout + done.stderr
    return effects.Effect.model_validate(json.loads(done.stdout))


@pytest.mark.usefixtures("kept")
def test_an_effect(cli: Cli) -> None:
    """An effect has the operator's share, prediction and measurement with intervals, and both drifts."""
    [one] = measure(cli, KERNEL.format(""), recipe("decode")).workloads
    is_noisy = one.unpredicted == "the times are too noisy"
    for ratio in (one.longer, one.operator, one.measured, *[one.predicted] * (not is_noisy)):
        assert ratio is not None
        assert 0 < ratio.low <= ratio.value <= ratio.high
    assert one.drift is not None
    assert (one.drift.places, one.drift.own.tops) == (2, 10)
    assert 0 < one.drift.kernel.largest < 0.1
    assert 0 < one.drift.own.largest < 0.1


@pytest.mark.usefixtures("kept")
def test_each_bad_input_has_its_words(cli: Cli) -> None:
    """Recipes that cannot be used, and a kernel that fails in the model only, have words that name the place."""
    names = ("prefill", "not built", "absent", "another", "outside", "too large", "bare")
    kernel = KERNEL.format("if len(x) not in (8, 128): raise ValueError('odd rows')")
    found = {one.name: str(one.ended) for one in measure(cli, kernel, recipe(*names), status=1).workloads}
    for name, words in {
        "prefill": "the model (drift): runtime_error: ValueError: odd rows (in layers.0.0 (RMSNorm), called with 2",
        "not built": "model cannot be used: reference_error: Model(*get_init_inputs()) raised AssertionError",
        "absent": "never occurs in the model: 0 modules have weights of its shapes (64), and none answers as",
        "another": "none answers as it does. Relative to the largest value, layers.0.0 (RMSNorm) differs by 0.0",
        "outside": "SHAPES: layers.0.0 (RMSNorm) is called with 130 x 64, and the problem has 128 x 64 or 8 x 64",
        "too large": "the model does not fit the memory: reference_error",
        "bare": ". kqueue[effect] brings it",
    }.items():
        assert words in found[name], found[name]


@pytest.mark.usefixtures("kept")
def test_a_kernel_that_idles_when_it_is_timed_fails(cli: Cli) -> None:
    """The tolerance of timed models refuses old answers, and the verdict on the kernel alone stays."""
    idle = "ModelNew.calls = getattr(ModelNew, 'calls', 0) + 1"
    idle += "\n        if ModelNew.calls > 12 and len(x) == 10: return x * 0"
    found = measure(cli, KERNEL.format(idle), recipe("decode"), status=1)
    assert found.verdict["category"] == "passed"
    assert "the kernel fails in the model (kernel): " in str(found.workloads[0].ended)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["llama", "mixture", "vision"])
def test_recipes_with_transformers(cli: Cli, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Each recipe builds in a small size, and a kernel takes the places of its norms."""
    needs("transformers")
    # Sealed processes can read the folders in PATH.
    monkeypatch.setenv("PATH", os.pathsep.join([os.environ["PATH"], ADAPTERS_FOLDER]))
    folder = Path(effects.__file__).parent
    source = (folder / "recipes" / f"{name}.py").read_text()
    source += (folder / "sealed" / "language.py").read_text() * ("LANGUAGE = " in source)
    for number, small in SMALL.items():
        source = source.replace(number, small)
    cli.write("model.py", f"import sys\nsys.path += [{ADAPTERS_FOLDER!r}]\n{source}")
    problem = NORM
    if name == "vision":
        problem = problem.replace("self.scale = torch.nn.Parameter(torch.randn(width))", BOTH)
        problem = problem.replace("rms_norm(x, (64,), self.scale, 1e-6)", "layer_norm(x, (64,), *self.both, 1e-12)")
    kernel = problem.split("def get_inputs")[0].replace("class Model(", "class ModelNew(")
    fields = {"problem": problem, "kernel": kernel, "backend": "torch", "settings": {"precision": "bf16"}}
    plan = effects.Plan.of(Request.model_validate(fields), str(cli.directory / "model.py"), 1)
    with LocalJudge("cpu", config=load(scratch=cli.directory / "scratch")) as judge:
        for workload in plan.workloads:
            message = judge(plan.evaluation("drift", workload)).message
            assert '"places": 5' in message, message
