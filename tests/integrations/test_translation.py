"""KernelBench's form, scores and texts, which are pure functions of a verdict."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
import torch

from kqueue import Category, ConfigError, InvalidRequest, Measurement, Precision, Request, Verdict
from kqueue.contract import Comparison, Phase
from kqueue.evidence import Environment, ErrorFigures, Evidence, Facts, SpeedOfLightBound
from kqueue.features.kernelbench.runs import pass_at_k, row_of, scores_of
from kqueue.feedback import causes, describe
from kqueue.integrations.common import lane_of, request_for, scorer
from kqueue.kernelbench import request_of, result_of
from workers.judge.channel.parameters import described
from workers.judge.pipeline import parameters

KERNEL = "import torch\n\n\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n        return x + bias\n"


def measurement(median_ms: float, basis: str = "gpu_clock") -> Measurement:
    """Return a time whose mean is twice its median."""
    return Measurement(
        basis=basis, count=17, median_ms=median_ms, q1_ms=median_ms * 0.9, q3_ms=median_ms * 1.1, std_ms=0.5,
        mean_ms=median_ms * 2, min_ms=median_ms / 2, max_ms=median_ms * 4, overhead_ms=0.1, cold_l2=True,
    )  # fmt: skip


CLOSE = ErrorFigures(
    max_abs_error=1e-6, max_rel_error=1e-5, relative_norm=1e-6, error_ratio=None, precision_downgrade=False,
    strict_correct=True, kernelbench_correct=True,
)  # fmt: skip


def verdict(category: Category = Category.PASSED, **fields: Any) -> Verdict:
    """Return a verdict of the lane gpu.h200."""
    made: dict[str, Any] = {"evaluation_id": uuid4(), "backend": "cuda", "lane": "gpu.h200", "attempts": 1}
    made |= {"submitted_at": datetime.now(UTC), "finished_at": datetime.now(UTC), "message": "what happened"}
    environment = Environment(device="NVIDIA H200", torch="2.11", python="3.12", host="here")
    made |= {"written_by": "judge", "environment": environment}
    return Verdict(category=category, **made | fields)


def test_arguments_become_settings() -> None:
    """Each argument of KernelBench becomes a field of a request."""
    asked: dict[str, Any] = {"backend": "Triton", "seed_num": 7, "num_correct_trials": 3, "num_perf_trials": 250}
    asked |= {"precision": "torch.bfloat16", "comparison": "kernelbench", "timeout_s": 30}
    request = request_of("class Model: ...", "class ModelNew: ...", **asked, lane="gpu.h200", batch="run")
    settings = request.settings
    assert (request.backend, request.lane, request.batch) == ("triton", "gpu.h200", "run")
    assert (settings.seed, settings.checks, settings.precision) == (7, 3, Precision.BF16)
    assert settings.comparison is Comparison.KERNELBENCH
    assert (settings.timing.enabled, settings.timing.calls) == (True, 250)
    assert settings.deadlines.compile_s == settings.deadlines.check_s == 30


def test_few_trials() -> None:
    """Zero trials disable timing, and too few for a median are increased to its minimum."""
    for trials, measure, timed, calls in (0, True, False, 5), (2, True, True, 5), (9, False, False, 9):
        timing = request_of("p", "k", num_perf_trials=trials, measure_performance=measure).settings.timing
        assert (timing.enabled, timing.calls) == (timed, calls)


def test_times_for_rewards_are_coarser() -> None:
    """A model's kernel is timed for a reward, unless the caller names another purpose."""
    made = [request_for("p", "k", **asked) for asked in ({}, {"purpose": "rank"}, {"num_perf_trials": 0})]
    assert [one.settings.timing.purpose for one in made if isinstance(one, Request)] == ["train", "rank", "check"]


def test_wrong_arguments_are_named() -> None:
    """A wrong argument is refused by its name."""
    for wrong, named in (
        ({"backend": "fortran"}, "backend: 'fortran'"),
        ({"precision": "fp8"}, "precision: 'fp8'"),
        ({"num_correct_trials": 0}, "num_correct_trials"),
        ({"num_correct_trials": True}, "num_correct_trials"),
        ({"num_correct_trials": "5"}, "num_correct_trials"),
        ({"num_perf_trials": 10_001}, "num_perf_trials"),
        ({"num_perf_trials": -1}, "num_perf_trials"),
        ({"seed_num": -1}, "seed_num"),
        ({"timeout_s": 0}, "timeout"),
        ({"timeout_s": float("nan")}, "timeout"),
        ({"comparison": "loose"}, "comparison"),
        ({"flavour": "vanilla"}, "flavour: there is no such field"),
    ):
        with pytest.raises(InvalidRequest, match=named):
            request_of("p", "k", **wrong)


def test_a_right_kernels_result() -> None:
    """A result has KernelBench's keys, its mean and the judge's facts, and is valid JSON."""
    evidence = Evidence(checks=7, checks_asked=5, comparison=CLOSE)
    right = verdict(runtime=measurement(2.0), baseline=measurement(3.0), evidence=evidence)
    result = result_of(right)
    json.dumps(result, allow_nan=False)
    assert (result["compiled"], result["correctness"]) == (True, True)
    assert (result["runtime"], result["ref_runtime"]) == (4.0, 6.0)
    assert result["runtime_stats"] == {
        "mean": 4.0, "median": 2.0, "std": 0.5, "min": 1.0, "max": 8.0, "num_trials": 17, "hardware": "NVIDIA H200",
        "device": "cuda:0",
    }  # fmt: skip
    untimed = result_of(verdict(runtime=measurement(0.0), baseline=measurement(3.0), evidence=evidence))
    assert (untimed["runtime"], untimed["runtime_stats"], untimed["metadata"]["speedup"]) == (-1.0, {}, None)
    metadata = result["metadata"]
    assert (metadata["category"], metadata["blame"]) == ("passed", "none")
    assert (metadata["speedup"], metadata["correctness_trials"], metadata["hidden_trials"]) == (1.5, "(5 / 5)", 2)
    assert metadata["kernelbench_correct"] is True
    assert metadata["evaluation_id"] == str(right.evaluation_id)
    assert row_of(right, 3) == {"sample_id": 3, **result}
    summarised = result_of(verdict(runtime=measurement(2.0)))["metadata"]
    assert not summarised.keys() & {"correctness_trials", "hidden_trials"}


def test_a_failures_result() -> None:
    """Each failure has the key that KernelBench's scripts read, and its blame."""
    for categories, compiled, key in (
        (("compile_error", "syntax_error"), False, "compilation_error"),
        (("illegal_memory_access", "timeout"), True, "runtime_error"),
        (("wrong_values", "reward_hack"), True, "correctness_issue"),
        (("worker_lost", "reference_error", "cancelled"), False, "error"),
    ):
        for category in map(Category, categories):
            facts = {"errors": CLOSE, "exception": "builtins.ValueError"}
            result = result_of(verdict(category, facts=facts, log="trace"))
            assert (result["compiled"], result["correctness"], result["runtime"]) == (compiled, False, -1.0)
            assert result["runtime_stats"] == result["ref_runtime_stats"] == {}
            metadata = result["metadata"]
            assert metadata["blame"] == str(category.blame)
            assert "what happened" in metadata[key]
            assert metadata[f"{key}_name"] == "builtins.ValueError"
            assert {"compilation_error", "runtime_error", "correctness_issue", "error"} & metadata.keys() == {key}
            assert ("max_difference" in metadata) == (key == "correctness_issue")


def test_pass_at_k() -> None:
    """The unbiased estimate: 1 - C(n-c, k) / C(n, k)."""
    assert pass_at_k(10, 0, 5) == 0
    assert pass_at_k(10, 10, 1) == 1
    assert pass_at_k(4, 1, 2) == pytest.approx(0.5)
    assert pass_at_k(4, 3, 2) == 1


def sample(sample_id: int, correct: bool, speedup: float | None = None, **more: Any) -> dict[str, Any]:
    """Return an entry of a results file."""
    metadata = {"category": "passed" if correct else "wrong_values", "speedup": speedup}
    return {"sample_id": sample_id, "compiled": True, "correctness": correct, "metadata": metadata, **more}


def test_scores_of_a_run() -> None:
    """Scores are pass@k over problems with k samples, fast_p over all problems, and the categories."""
    results = {
        "1": [sample(0, True, 2.0), sample(1, False)],
        "2": [sample(0, True, 0.5)],
        "3": [],
        "4": [sample(0, True, None, runtime=2.0, ref_runtime=8.0)],
    }
    scores = scores_of(results, [1, 2, 3], [0.0, 1.0, 2.0, 4.0], problems=4)
    assert (scores["problems"], scores["samples"], scores["correct"], scores["timed"]) == (3, 4, 3, 3)
    known = {k: (one["value"], one["problems"]) for k, one in scores["pass_at_k"].items()}
    assert known == {1: (pytest.approx(2.5 / 3), 3), 2: (1.0, 1), 3: (None, 0)}
    assert scores["fast_p"] == {0.0: 0.75, 1.0: 0.5, 2.0: 0.25, 4.0: 0.0}
    # A kernel that is faster within its error only is not faster.
    results["1"][0]["metadata"]["speedup_low"] = 0.9
    again = scores_of(results, [], [1.0], problems=4)
    assert (again["fast_p"], again["fast_p_estimate"]) == ({1.0: 0.25}, {1.0: 0.5})
    assert scores["geometric_mean_speedup"] == pytest.approx((2.0 * 0.5 * 4.0) ** (1 / 3))
    assert scores["categories"] == {"passed": 3, "wrong_values": 1}


LANES = {
    "A100": "gpu.a100", "A100-80GB": "gpu.a100", "NVIDIA A100-SXM4-80GB": "gpu.a100", "L40S": "gpu.l40s",
    "H100!": "gpu.h100", "H200:1": "gpu.h200", "A10G": "gpu.a10g", "rtx 4090": "gpu.rtx4090", "any": "gpu",
    "CPU": "cpu", "auto": "auto",
}  # fmt: skip


def test_gpu_types_are_lanes() -> None:
    """Common and vendor names of GPUs map to lanes, and each GPU has one lane."""
    assert {gpu_type: lane_of(gpu_type) for gpu_type in LANES} == LANES
    for gpu_type in ("H100:8", "", "!", "H100:many"):
        with pytest.raises(InvalidRequest, match="gpu_type"):
            lane_of(gpu_type)


POLICIES = ("inverse_runtime", "speedup", "speedup_estimate", "bandwidth", "correctness")


def test_scores_of_verdicts() -> None:
    """The named policies give no score for a failure of the fleet and 0 for the kernel's."""
    right = verdict(runtime=measurement(2.0), baseline=measurement(3.0))
    assert [scorer(name)(right) for name in ("inverse_runtime", "speedup", "correctness")] == [500.0, 1.5, 1.0]
    times = (
        measurement(ms).model_copy(update={"low_ms": low, "high_ms": high}) for ms, low, high in ((2, 1, 3), (3, 3, 3))
    )
    rough = verdict(runtime=next(times), baseline=next(times))
    assert (scorer("speedup")(rough), scorer("speedup_estimate")(rough)) == (1.0, 1.5)
    for category in (Category.COMPILE_ERROR, Category.WRONG_VALUES, Category.REWARD_HACK):
        assert {scorer(name)(verdict(category)) for name in POLICIES} == {0.0}
    for category in (Category.WORKER_LOST, Category.REFERENCE_ERROR, Category.EXPIRED):
        assert {scorer(name)(verdict(category)) for name in POLICIES} == {None}
    floor = SpeedOfLightBound(bytes_in=8, bytes_out=8, bandwidth_gbs=1.0, floor_ms=0.5, floor_out_ms=0.25)
    bounded = verdict(runtime=measurement(2.0), evidence=Evidence(floor=floor))
    assert (scorer("bandwidth")(bounded), scorer("bandwidth")(right)) == (0.25, None)
    untimed = verdict()
    assert (scorer("speedup")(untimed), scorer("correctness")(untimed)) == (None, 1.0)
    assert scorer(lambda given: given.attempts + 1.0)(right) == 2.0
    with pytest.raises(ConfigError, match="correctness"):
        scorer("fastest")


def test_words_for_known_causes() -> None:
    """Facts that explain wrong values or a failed launch are named with their remedy, and there are no others."""
    comparison: dict[str, Any] = {"output": 0, "kind": "given", "wrong": 2, "of": 8}
    comparison["errors"] = CLOSE.model_copy(update={"precision_downgrade": True, "relative_norm": 3e-4})
    comparison["first"] = [{"index": [1], "expected": 1.0, "got": 2.0}]
    evidence: dict[str, Any] = {"inputs": [{"shape": [8], "dtype": "complex64"}], "parameters": "DIFFERENT"}
    evidence |= {"reference_draws": True, "training_modules": ["Dropout"]}
    facts = comparison | {"unwritten": 2, "ties_only": True, "effect": "gradient of inputs[0]"}
    words = verdict(Category.WRONG_VALUES, phase=Phase.CHECK, facts=facts, evidence=evidence)
    said = [*causes(words), *causes(verdict(Category.WRONG_VALUES, phase=Phase.CHECK, facts=comparison))]
    for part in ("All wrong", "ties", "DIFFERENT", "random numbers", "its Dropout", "TF32 or fp16", "conjugate"):
        assert any(part in line for line in said), part
    assert not list(causes(verdict(Category.RUNTIME_ERROR, evidence=evidence)))
    for code, number in (1, 1), (701, 0):
        assert len(list(causes(verdict(Category.LAUNCH_RESOURCES_EXCEEDED, facts={"cuda_code": code})))) == number
    unlike = causes(verdict(Category.NOT_FINITE, facts=comparison | {"unwritten": 2, "likeness": "LIKE"}))
    assert "LIKE" not in [*unlike]
    assert "overflow" not in " ".join(causes(verdict(Category.NOT_FINITE, facts=comparison, evidence=evidence)))


def test_parameters_differ_by_more_than_names() -> None:
    """Other values, another order and other shapes are named. Other names alone change no result."""
    first, second, third = (torch.nn.Linear(2, 2, bias=False) for _ in range(3))

    def of(**modules: torch.nn.Module) -> str:
        return described(torch.nn.ModuleDict(modules))

    reference = of(a=first, b=second, c=torch.nn.Dropout())
    assert parameters.modes(reference) == ["Dropout"]
    assert parameters.difference(of(x=first, y=second), reference) is None
    assert parameters.difference(of(a=third, b=second), reference) == "1 of 2 have other values, the first a.weight"
    assert parameters.difference(of(a=third, b=second), reference, ["a.weight"]) is None
    swapped = "they are created in another order: b.weight, a.weight instead of a.weight, b.weight"
    assert parameters.difference(of(b=first, a=second), reference) == swapped
    assert parameters.difference("", reference) == "they are none instead of a.weight [2, 2], b.weight [2, 2]"


def test_words_for_an_exception() -> None:
    """The raising line of the kernel is marked and shown with its neighbours."""
    log = '  File "/w/harness.py", line 9, in run\n  File "/s/kernel.py", line 6, in forward\nNameError: bias\n'
    message = "see https://a.org/b/c.html in /tmp/x/k.cu"
    facts = Facts(exception="builtins.NameError")
    text = describe(verdict(Category.RUNTIME_ERROR, phase=Phase.CHECK, log=log, message=message, facts=facts), KERNEL)
    assert "see https://a.org/b/c.html in k.cu\n" in text
    assert "At line 6, in forward:" in text
    assert "     5 |     def forward(self, x):\n>    6 |         return x + bias" in text
    far, printed = log.replace("line 6", "line 600"), f"Traceback (most recent call last):\n{log}"
    assert "At line" not in describe(verdict(Category.RUNTIME_ERROR, log=far, facts=facts), KERNEL)
    assert "At line" not in describe(verdict(Category.WRONG_SHAPE, log=printed), KERNEL)  # The kernel handled it.
    assert "At line 6" in describe(verdict(Category.TIMEOUT, log='File "./kernel.py", line 6 in forward'), KERNEL)
    died = f"free(): invalid pointer\nFatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n{log}"
    assert "it wrote: free(): invalid pointer\nAt line 6" in describe(verdict(Category.CRASHED, log=died), KERNEL)


@pytest.mark.parametrize(
    ("floor_ms", "limit"), [(1.5, "It is limited by memory bandwidth"), (0.1, "It is not limited by the memory")]
)
def test_words_for_a_right_kernel(floor_ms: float, limit: str) -> None:
    """The text has both times, the memory-bound share, and the device code that ran."""
    floor = {"bytes_in": 1000, "bytes_out": 500, "bandwidth_gbs": 4000.0, "floor_ms": floor_ms, "floor_out_ms": 0.0}
    own = {"own_share": 1.0, "own": ["add"], "library": [], "unclear_share": 0.0, "unclear": [], "copies_share": 0.0}
    own |= {"decoy": False, "why": "kernels of its own source 98%", "basis": "its profile"}
    evidence = {"floor": floor, "provenance": own}
    text = describe(verdict(runtime=measurement(2.0), baseline=measurement(3.0), evidence=evidence), KERNEL)
    times = "Runtime: 2 ms (median of 17 calls", "Reference: 3 ms: speedup 1.50x."
    moved = f"1500 bytes at 4000.0 GB/s) takes {floor_ms} ms, {floor_ms / 2:.0%} of the runtime"
    for words in ("CORRECT", *times, moved, limit, "kernels of its own source 98%"):
        assert words in text


def test_words_where_nothing_is_known() -> None:
    """A fleet's failure is reported as the fleet's, and feedback fits into a prompt."""
    text = describe(verdict(Category.WORKER_LOST), KERNEL)
    assert text.startswith("NOT JUDGED (worker_lost, to blame: fleet)")
    assert "FAILED" not in text
    text = describe(verdict(Category.RUNTIME_ERROR, message="m" * 9000), KERNEL, limit=500)
    assert len(text) == 500
    assert text.endswith("... (cut off)")
