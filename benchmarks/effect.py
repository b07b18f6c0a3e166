"""Measure effects on models of transformers: `python benchmarks/effect.py --out FILE [--slots N] [--seconds N]`.

It starts a fleet, and measures until `--seconds` have passed, on the first workload of each recipe with two layers:

- kernels of five operators in the models of the three recipes: do prediction and measurement agree within 2 points?
- an operator of a few percent of the time, with a kernel that is twice as fast: is the small gain found?
- a kernel that is right alone and changes 1 % of the top tokens: do the words name it?
- operators swapped with themselves, while slots are free: at most one swap of 20 can have an effect. A swap is three
  rounds, drawn at random from all evaluations of the original and of the model with the operator as its kernel.

Evaluations that two effects have in common are made once. `--lane cpu` makes the models small, for a trial without a
GPU, whose figures mean nothing. transformers must be installed (`kqueue[effect]`). The exit status is 0 only if each
condition holds for all effects, and none is missing. The file also has the mean seconds of the stages of evaluations.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import Future
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from speed import about, fleet

from kqueue import Client, Request, Verdict
from kqueue.contract import Priority
from kqueue.errors import InvalidRequest
from kqueue.features.duel.duels import Trial
from kqueue.features.effect import effects
from kqueue.features.effect.effects import Effect, Plan, Ratio, effect
from kqueue.judging import guess_backend

#: Rows and widths of the inputs of norms and of activations, by model, and for small models.
NORMS = {"llama": (2048, 2048), "mixture": (2048, 1024), "vision": (64 * 197, 768)}
ACTIVATIONS = {"llama": (2048, 5632), "mixture": (4096, 3584), "vision": (64 * 197, 3072)}
SMALL_ROWS = {"llama": (64, 64), "mixture": (64, 128), "vision": (10, 10)}
LAYERS = '64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8'
#: Changes of the recipes by lane: two layers and fewer tokens in the vocabulary, or a small model.
SIZES = {
    "gpu": {
        '"num_hidden_layers": 8': '"num_hidden_layers": 2',
        '"num_hidden_layers": 6': '"num_hidden_layers": 2',
        "vocab_size=32000": "vocab_size=2048",
        '"image_size": 224}': '"image_size": 224, "num_hidden_layers": 2}',
    },
    "cpu": {
        '2048, "intermediate_size": 5632, "num_hidden_layers": 8, "num_attention_heads": 32': LAYERS,
        '1024, "intermediate_size": 3584, "num_hidden_layers": 6, "num_attention_heads": 16': LAYERS,
        "vocab_size=32000": "vocab_size=200",
        '"tokens": 2048': '"tokens": 64',
        '"image_size": 224}': '"image_size": 32, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, '
        '"num_attention_heads": 4}',
        '"images": 64': '"images": 2',
    },
}
#: Modules that sealed processes import. They cannot write the bytecode.
IMPORTS = "from transformers import LlamaForCausalLM, MixtralForCausalLM, ViTForImageClassification"
#: A class by its name, the statement of its constructor, and its forward.
CLASS = """
class {}(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        {}
    def forward(self, x):
        {}
"""
INPUTS = "def get_inputs():\n    return [torch.randn({0}, {1})]\ndef get_init_inputs():\n    return [{1}]\n"
#: The constructor and the forward of each operator, as transformers has them.
OPERATORS = {
    "rms_norm": (
        "self.weight = torch.nn.Parameter(torch.ones(width))",
        "y = x.float(); y = y * torch.rsqrt(y.pow(2).mean(-1, True) + 1e-6); return self.weight * y.to(x.dtype)",
    ),
    "silu": ("pass", "return torch.nn.functional.silu(x)"),
    "layer_norm": ("self.norm = torch.nn.LayerNorm(width, eps=1e-12)", "return self.norm(x)"),
    "gelu": ("pass", "return torch.nn.functional.gelu(x)"),
    "slow_silu": ("pass", "return [torch.nn.functional.silu(x) for _ in range(2)][1]"),
}
#: Operators that are replaced by the function that the model's code calls, and not by modules.
FUNCTIONS = {"gelu": "torch.nn.functional.gelu"}
TRITON = """
import triton
import triton.language as tl
@triton.jit
def normalize(x_ptr, weight_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    mask = offsets < columns
    at = tl.program_id(0) * columns + offsets
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / columns + 1e-6)
    y = y.to(out_ptr.dtype.element_ty) * tl.load(weight_ptr + offsets, mask=mask, other=0.0)
    tl.store(out_ptr + at, y, mask=mask)
"""
#: The operator and the forward of each kernel. The coarse one rounds as a smaller format would.
KERNELS = {
    "fused_rms_norm": ("rms_norm", "return torch.nn.functional.rms_norm(x, x.shape[1:], self.weight, 1e-6)"),
    "triton_rms_norm": (
        "rms_norm",
        (
            "x = x.contiguous(); out = torch.empty_like(x); n = x.shape[1]; normalize[(x.shape[0],)]"
            "(x, self.weight, out, n, BLOCK=triton.next_power_of_2(n), num_warps=8); return out"
        ),
    ),
    "eager_silu": ("silu", "return x * torch.sigmoid(x.float()).to(x.dtype)"),
    "eager_gelu": ("gelu", "return 0.5 * x * (1 + torch.erf(x.float() * 0.5**0.5)).to(x.dtype)"),
    "eager_layer_norm": (
        "layer_norm",
        (
            "y = x.float(); y = y - y.mean(-1, True); y = y * torch.rsqrt(y.square().mean(-1, True) + 1e-12); "
            "return (y * self.norm.weight + self.norm.bias).to(x.dtype)"
        ),
    ),
    "half_silu": ("slow_silu", "return torch.nn.functional.silu(x)"),
    "coarse_rms_norm": ("rms_norm", OPERATORS["rms_norm"][1].replace("y.to", "(32 * y).round().div(32).to")),
}
#: Kernels that are measured in each model, with the conditions that their effects have to meet.
MEASURED = {
    "llama": ("fused_rms_norm", "triton_rms_norm", "eager_silu"),
    "mixture": ("fused_rms_norm", "triton_rms_norm", "eager_silu"),
    "vision": ("eager_gelu", "eager_layer_norm"),
}
#: Operators that are swapped with themselves, and the number of swaps.
ITSELF, SWAPS = {"llama": "rms_norm", "mixture": "silu", "vision": "layer_norm"}, 40
ROUNDS = 3
#: End of a Llama whose activation is computed twice.
SLOW = """
class _Slow(torch.nn.Module):
    def forward(self, x):
        torch.nn.functional.silu(x)
        return torch.nn.functional.silu(x)
_Fast = Model
class Model(_Fast):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        for layer in self.model.model.layers:
            layer.mlp.act_fn = _Slow()
"""


def plan(folder: Path, lane: str, model: str, kernel: str, rounds: int) -> Plan:
    """Return the plan for a kernel, or an operator as its own kernel, in the first workload of a model."""
    operator, body = KERNELS.get(kernel) or (kernel, OPERATORS[kernel][1])
    is_norm = operator in ("rms_norm", "layer_norm")
    rows, width = (NORMS if is_norm else ACTIVATIONS)[model]
    parts = Path(effects.__file__).parent
    recipe = (parts / "recipes" / f"{model}.py").read_text()
    recipe += (parts / "sealed" / "language.py").read_text() * ("LANGUAGE = " in recipe)
    for old, new in SIZES[lane].items():
        recipe = recipe.replace(old, new)
    if lane == "cpu":
        rows, width = SMALL_ROWS[model][not is_norm], 64 if is_norm else 96
    file = folder / f"{model}-{operator}.py"
    file.write_text(recipe + SLOW * (operator == "slow_silu"))
    source = "import torch\n" + TRITON * ("normalize[" in body) + CLASS.format("ModelNew", OPERATORS[operator][0], body)
    request = Request.model_validate(
        {
            "problem": "import torch\n" + CLASS.format("Model", *OPERATORS[operator]) + INPUTS.format(rows, width),
            "kernel": source,
            "backend": guess_backend(source),
            "lane": lane,
            "kernel_label": kernel,
            "settings": {"precision": "bf16"},
        }
    )
    made = Plan.of(request, str(file), rounds, FUNCTIONS.get(operator, ""))
    return replace(made, workloads=dict([next(iter(made.workloads.items()))]))


class Judge:
    """A fleet, which makes each evaluation once that several effects have in common."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._known: dict[tuple[str, ...], Future[Verdict | InvalidRequest]] = {}
        self._lock = threading.Lock()
        self.stages: dict[str, list[dict[str, float]]] = defaultdict(list)
        self.failures: Counter[str] = Counter()

    def __call__(self, requests: list[Request]) -> list[Verdict | InvalidRequest]:
        """Return the verdicts of requests in their order."""
        names = [str(one.idempotency_key).partition("/")[2] for one in requests]
        keys = [(one.problem_hash, one.kernel_hash, name) for one, name in zip(requests, names, strict=True)]
        with self._lock:
            due = {key: one for key, one in zip(keys, requests, strict=True) if key not in self._known}
            self._known |= {key: Future() for key in due}
        for key, verdict in zip(due, self._client.evaluate_batch(due.values()), strict=True):
            self._known[key].set_result(verdict)
            role = key[2].split()[-2]
            if role != "drift" and not (isinstance(verdict, Verdict) and verdict.passed):
                self.failures[f"{role}: {getattr(verdict, 'message', verdict)}"] += 1
            if isinstance(verdict, Verdict):
                seconds = {"from_submission": (verdict.finished_at - verdict.submitted_at).total_seconds()}
                self.stages[role].append(seconds | (verdict.evidence.durations_s or {}))
        return [self._known[key].result() for key in keys]


def figures(kind: str, found: Effect) -> dict[str, Any]:
    """Return an effect as a record."""
    [one] = found.workloads or [effects.Workload(name="", ended=str(found.verdict["message"]))]
    known = {"kind": kind, "model": found.model, "kernel": found.kernel, "right": is_right(kind, one)}
    return known | {"words": list(found.words())} | one.model_dump(mode="json")


def is_right(kind: str, one: effects.Workload) -> bool:
    """Return whether an effect meets its condition."""
    if kind == "named":
        return any("changes 1 % of the top tokens" in line for line in one.words())
    if one.predicted is None or one.measured is None:
        return False
    return abs(one.predicted.value - one.measured.value) <= 0.02 and (kind != "small" or one.measured.low > 1)


def swaps(trials: dict[str, dict[str, list[Trial]]]) -> list[dict[str, Any]]:
    """Return swaps of operators with themselves, drawn from the evaluations of each model."""
    draw, made = random.Random(0), list[dict[str, Any]]()
    for model, roles in trials.items():
        some = [list(combinations(roles[role], ROUNDS)) for role in ("original", "kernel")]
        for _ in range(SWAPS // len(ITSELF) + 1 if all(some) else 0):
            ratio = Ratio.of(zip(*(draw.choice(each) for each in some), strict=True))
            made.append({"model": model, "gain": ratio if isinstance(ratio, str) else ratio.model_dump()})
            made[-1]["right"] = not isinstance(ratio, str) and ratio.low <= 1 <= ratio.high
    return made[:SWAPS]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the file for the figures")
    parser.add_argument("--lane", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=255, help="time after which no more is waited for (255)")
    parser.add_argument("--only", default="", help="measure only those whose name has this text")
    options = parser.parse_args()
    begun, records = time.monotonic(), list[dict[str, Any]]()
    due = [("kernel", model, kernel, 2) for model, kernels in MEASURED.items() for kernel in kernels]
    due += [("small", "llama", "half_silu", ROUNDS), ("named", "llama", "coarse_rms_norm", 1)]
    due = [one for one in due if options.only in " ".join(map(str, one))]
    itself = {model: name for model, name in ITSELF.items() if options.only in f"itself {model} {name}"}
    trials = {model: {role: list[Trial]() for role in ("original", "kernel")} for model in itself}
    imported = subprocess.Popen([sys.executable, "-c", IMPORTS])
    with tempfile.TemporaryDirectory(prefix="kqueue-effect-") as name, fleet(options.lane, options.slots) as client:
        judge = Judge(client)
        imported.wait()
        print(f"ready after {time.monotonic() - begun:.0f} s", flush=True)

        def measure(kind: str, model: str, kernel: str, rounds: int) -> None:
            try:
                found = effect(judge, plan(Path(name), options.lane, model, kernel, rounds))
                records.append(figures(kind, found))
            except Exception as error:  # noqa: BLE001 -- is reported
                records.append({"kind": kind, "model": model, "kernel": kernel, "right": False, "ended": repr(error)})
            print(json.dumps({key: value for key, value in records[-1].items() if key != "words"}), flush=True)

        def swap(model: str, operator: str) -> None:
            made, roles = plan(Path(name), options.lane, model, operator, 1), ("original", "kernel")
            for number in range(0, 12, 2):
                due = [(role, 100 + one) for one in (number, number + 1) for role in roles]
                requests = [made.evaluation(role, next(iter(made.workloads)), one) for role, one in due]
                try:
                    answers = judge([one.model_copy(update={"priority": Priority.IDLE}) for one in requests])
                except Exception:  # noqa: BLE001 -- the fleet has ended
                    return
                for (role, _), answer in zip(due, answers, strict=True):
                    trials[model][role] += [Trial.of(answer)] if isinstance(answer, Verdict) else []

        threads = [threading.Thread(target=measure, args=one, daemon=True) for one in due]
        threads += [threading.Thread(target=swap, args=one, daemon=True) for one in itself.items()]
        for one in threads:
            one.start()
        for one in threads:
            one.join(max(0.0, begun + options.seconds - time.monotonic()))
        summary: dict[str, Any] = {"about": about(options.lane), "slots": options.slots}
        summary |= {"seconds": round(time.monotonic() - begun, 1)}
        for kind in ("kernel", "small", "named"):
            some = [one["right"] for one in records if one["kind"] == kind]
            summary[kind] = {"due": sum(one[0] == kind for one in due), "measured": len(some), "right": sum(some)}
        swapped = swaps(trials)
        right = sum(one["right"] for one in swapped)
        summary["itself"] = {"due": SWAPS * bool(itself), "measured": len(swapped), "right": right}
        summary["evaluations"] = {role: len(some) for role, some in judge.stages.items()}
        summary["failures"] = judge.failures
        summary["stages"] = {role: means(some) for role, some in judge.stages.items()}
        raw = {
            model: {role: [(one.category, one.speedup, one.interval) for one in some] for role, some in roles.items()}
            for model, roles in trials.items()
        }
        options.out.write_text(json.dumps(summary | {"effects": records, "swaps": swapped, "trials": raw}, indent=1))
        print(json.dumps(summary), flush=True)
    complete = all(summary[kind]["right"] == summary[kind]["due"] for kind in ("kernel", "small", "named"))
    odd = summary["itself"]["due"] - summary["itself"]["right"]
    return 0 if complete and odd <= SWAPS // 20 else 1


def means(stages: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean seconds of each stage."""
    names = {name for one in stages for name in one}
    return {name: round(statistics.fmean(one.get(name, 0.0) for one in stages), 3) for name in sorted(names)}


if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    sys.exit(main())
