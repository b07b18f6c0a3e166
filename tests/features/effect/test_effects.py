"""Effects: the figures that follow from evaluations, and the operator's places in a model."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kqueue import shapes
from kqueue.categories import Category
from kqueue.contract import Outcome, Request
from kqueue.errors import InvalidRequest
from kqueue.evidence import Evidence
from kqueue.features.duel.duels import Trial
from kqueue.features.effect import effects
from kqueue.features.effect.effects import Plan, Ratio, Workload, effect
from tests.features.effect.samples import KERNEL, NORM, RECIPE, TANH, recipe
from tests.samples import ended, measurement, passed

REQUEST = Request(problem=NORM, kernel=KERNEL.format(""), backend="torch", kernel_label="mine")
DISTANCE = {"tops": 200, "changed": 1, "kl": 1e-4, "largest": 0.1, "usual": 0.6}
DRIFT = {"places": 2, "calls": 2, "shapes": ["2 x 5 x 64"], "own": DISTANCE}
#: Time of a model in ms, and relative error of a process's time, half of which a verdict's interval covers.
MODEL_MS, ERROR = 4.0, 0.005


def plan(tmp_path: Path, rounds: int = 3, name: str = "decode") -> Plan:
    (tmp_path / "model.py").write_text(recipe(name))
    return Plan.of(REQUEST, str(tmp_path / "model.py"), rounds)


def simulated(share: float, speedup: float, seed: int = 0, **changed: Any) -> Any:
    """Return a judge of models in which the operator has a share of the time, and the kernel a speedup."""

    def time(ms: float, *names: object) -> Any:
        taken = ms * math.exp(random.Random(f"{seed} {names}").gauss(0, ERROR / 1.96))
        return measurement(taken).model_copy(update={"low_ms": taken * (1 - ERROR), "high_ms": taken * (1 + ERROR)})

    def evaluate(requests: list[Request]) -> Iterator[Outcome]:
        for request in requests:
            name = str(request.idempotency_key).split("/")[1]
            role = name.split()[-2]
            parts = {"twice": 1 + share, "kernel": max(0.1, 1 - share + share / speedup), "operator": 1 / speedup}
            if role == "drift":
                text = (
                    f"the problem's check() refuses the outputs: {json.dumps(DRIFT | {'kernel': DISTANCE | changed})}"
                )
                evidence = Evidence.model_validate({"checker": {"bound": 0.05}})
                yield ended(Category.WRONG_VALUES, message=text, evidence=evidence)
            else:
                ms = MODEL_MS * parts.get(role, 1.0)
                yield passed(runtime=time(ms, name), baseline=time(MODEL_MS, name, "baseline"))

    return evaluate


def test_small_effects_are_found_and_a_swap_with_itself_seldom_has_one(tmp_path: Path) -> None:
    """An operator of 3 % that is twice as fast gains 1.5 %, as predicted. At most 5 % of equal swaps have an effect."""
    made = plan(tmp_path)
    [one] = effect(simulated(0.03, 2.0), made).workloads
    assert one.predicted is not None
    assert one.longer is not None
    assert one.longer.low < 1.03 < one.longer.high
    assert one.predicted.value == pytest.approx(1 / 0.985, abs=0.005)
    [noisy] = effect(simulated(1.2, 10.0), made).workloads
    assert (noisy.predicted, noisy.unpredicted) == (None, "the times are too noisy")
    gains = [effect(simulated(0.03, 2.0, seed), made).workloads[0].measured for seed in range(20)]
    assert sum(gain is not None and gain.low > 1 for gain in gains) >= 18
    swaps = [effect(simulated(0.1, 1.0, seed), made).workloads[0].measured for seed in range(40)]
    assert sum(swap is None or not swap.low <= 1 <= swap.high for swap in swaps) <= 2


@pytest.mark.parametrize(("speedup", "is_found"), [(1.05, True), (1.01, False)])
def test_an_interval_has_the_scatter_between_processes(speedup: float, is_found: bool) -> None:
    """One noisy trial of four spoils no effect. Trials that scatter more than their intervals show no small effect."""

    def trial(value: float, error: float) -> Trial:
        return Trial(Category.PASSED, value, ("call", False), None, interval=(value - error, value + error))

    original, kernel = ([trial(by * value, 0.002) for value in (0.99, 1.0, 1.01)] for by in (1, speedup))
    found = Ratio.of(original, [*kernel, trial(0.9, 0.4)])
    assert not isinstance(found, str)
    assert (found[0].low > 1) == is_found
    assert found[0].value == pytest.approx(speedup, abs=0.005)


def test_a_declared_tolerance_holds_for_the_operator(tmp_path: Path) -> None:
    """The problem's tolerance is the operator's in the model's shapes, and not the model's."""
    problem = NORM + "OUTPUT_TOLERANCE = {'rtol': 0.07}\n"
    made = replace(plan(tmp_path), request=REQUEST.model_copy(update={"problem": problem}))
    for role, count in (("operator", 1), ("drift", 0)):
        assert len(shapes.assigned(str(made.evaluation(role, "decode").problem), "OUTPUT_TOLERANCE")) == count


def test_a_kernel_that_changes_top_tokens_is_named(tmp_path: Path) -> None:
    """From 1 % of other top tokens on, the words say so, and whether the precision alone changes as many."""
    made = plan(tmp_path, rounds=1)
    for changed, words in ((1, None), (2, "1 % of the top tokens or more, more than the precision")):
        [one] = effect(simulated(0.1, 1.0, changed=changed), made).workloads
        lines = "\n".join(one.words())
        assert (words in lines) if words else ("or more" not in lines)
    assert one.drift is not None
    assert (one.drift.tolerance, one.drift.kernel.changed) == (0.4, 2)
    assert Workload(name="a", ended="b").words().__next__() == "a: b"


@pytest.mark.parametrize(
    ("role", "category", "blame", "words", "number"),
    [
        ("alone", Category.WRONG_VALUES, "candidate", "mine alone: wrong_values: ended as wrong_values", 1),
        ("drift", Category.CRASHED, "candidate", "the kernel fails in the model (drift): crashed", 2),
        ("kernel", Category.NOT_FINITE, "candidate", "the kernel fails in the model (kernel): not_finite", 6),
        ("twice", Category.WRONG_VALUES, "problem", "the model fails without the kernel: wrong_values", 6),
        ("original", Category.REFERENCE_ERROR, "problem", "model cannot be used: reference_error", 6),
        ("original", Category.JUDGE_ERROR, "none", "there are no times to compare: judge_error", 6),
        ("operator", Category.WRONG_VALUES, "none", "no prediction: with the model's shapes the kernel ended", 6),
    ],
)
def test_each_failure_has_its_words_and_its_blame(
    tmp_path: Path, role: str, category: Category, blame: str, words: str, number: int
) -> None:
    """A kernel that fails alone is not tried in the model, and a model that fails without it is not its fault."""
    judged: list[str] = []

    def failing(requests: list[Request]) -> Iterator[Outcome]:
        for request in requests:
            judged.append(str(request.idempotency_key).split("/")[1])
            yield ended(category) if role in judged[-1] else next(simulated(0.1, 1.0)([request]))

    found = effect(failing, plan(tmp_path, rounds=1))
    lines = "\n".join(found.words())
    assert (found.blame, words in lines, len(judged)) == (blame, True, number), lines


def test_bad_options_are_refused() -> None:
    """An unknown recipe, settings without times, and a stored problem have their words."""
    for changed, model, words in (
        ({}, "gpt", "kqueue brings llama, mixture, vision"),
        ({"settings": {"timing": {"purpose": "check"}}}, "llama", "an effect compares times"),
        ({"problem": "sha256:" + "0" * 64}, "llama", "--problem: give a file"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            Plan.of(Request.model_validate(REQUEST.model_dump() | changed), model, 3)


@pytest.fixture(scope="module")
def swap() -> ModuleType:
    """Return the code of sealed processes."""
    module = ModuleType("swap")
    file = Path(effects.__file__).parent / "sealed" / "swap.py"
    exec(compile(file.read_text(), "swap.py", "exec"), vars(module))
    return module


def made(swap: ModuleType, operator: str, problems: list[str], kernel: str) -> Any:
    """Return the parts of a drift, its inputs, and models: the original, with doubled calls, and with the kernel."""
    [workload] = [one for one in shapes.read(RECIPE) if one.name == "prefill"]
    names: dict[str, Any] = {}
    exec(kernel, names)
    recipe = shapes.problem_of(RECIPE, workload)
    drift, twice = (swap.Parts(recipe, problems, operator, role) for role in ("drift", "twice"))
    models: list[Any] = []
    with torch.no_grad():
        for parts, kind in ((drift, None), (twice, None), (drift, names["ModelNew"])):
            torch.manual_seed(7)
            models.append(parts.model(kind)())
            models[-1].setup()
    return drift, drift.get_inputs(), models


@pytest.mark.parametrize(("operator", "places"), [("", 2), ("torch.tanh", 1)])
def test_an_operator_is_found_by_its_answers(
    swap: ModuleType, monkeypatch: pytest.MonkeyPatch, operator: str, places: int
) -> None:
    """Modules with other names and forms of inputs are found, and functions. Kernels have the reference's weights."""
    monkeypatch.setattr(torch, "tanh", torch.tanh)  # A kernel stays in a function's place.
    problems = [TANH] if operator else [shapes.problem_of(NORM, one) for one in shapes.read(NORM)]
    kernel = TANH.replace("class Model", "class ModelNew") if operator else KERNEL.format("")
    parts, inputs, models = made(swap, operator, problems, kernel)
    with torch.no_grad():
        reference, doubled, swapped = (model(*inputs) for model in models)
        models[0](*inputs)
        drift = effects.Drift.model_validate_json(parts.check(reference, swapped, inputs))
    assert torch.equal(reference[0], doubled)
    wrong = reference[0] + 1, reference[1]
    assert [parts.check(reference, other, inputs) for other in (reference, wrong)] == [True, False]
    assert (drift.places, drift.calls, drift.shapes, drift.kernel.changed) == (places, 2, ("2 x 32 x 64",), 0)
    assert drift.kernel.largest < 1e-5


def test_a_function_s_kernel_is_called_in_the_model_only(swap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel takes the calls with the problem's shapes, can call the function itself, and its errors name it."""
    monkeypatch.setattr(torch, "tanh", torch.tanh)
    body = "if len(x) == 64: raise ValueError('called')\n        return torch.tanh(x)"
    kernel = TANH.replace("class Model", "class ModelNew").replace("return torch.tanh(x)", body)
    _, inputs, models = made(swap, "torch.tanh", [TANH], kernel)
    assert torch.tanh(torch.zeros(64, 64)).sum() == 0
    with pytest.raises(ValueError, match=r"called \(in torch.tanh, called with 2 x 32 x 64\)"):
        models[-1](*inputs)


@pytest.mark.parametrize(
    ("operator", "old", "new", "words"),
    [
        ("torch.tanhh", "", "", "the operator torch.tanhh is no function: module 'torch' has no attribute 'tanhh'"),
        ("torch.erf", "", "", "never occurs in the model: it does not call torch.erf"),
        (
            "torch.tanh",
            "torch.tanh(x)",
            "1.1 * torch.tanh(x)",
            "no call of torch.tanh answers as it does. Relative to the largest",
        ),
        ("torch.tanh", "64, 64", "63, 64", "SHAPES: torch.tanh is called with 64 x 64, and the problem has 63 x 64"),
    ],
)
def test_a_function_that_is_no_operator_has_its_words(
    swap: ModuleType, monkeypatch: pytest.MonkeyPatch, operator: str, old: str, new: str, words: str
) -> None:
    """A function that does not exist, is not called, answers otherwise, or has other shapes, ends with words."""
    monkeypatch.setattr(torch, "tanh", torch.tanh)
    with pytest.raises(LookupError, match=words):
        made(swap, operator, [TANH.replace(old, new) if old else TANH], "ModelNew = None")
