"""Measure effects on models of transformers: `python benchmarks/effect.py --out FILE [--slots N] [--seconds N]`.

It starts a fleet, and measures until `--seconds` have passed, on the first workload of each recipe with two layers, in
this order:

1. kernels of five operators in the models of the three recipes: do prediction and measurement agree within 2 points?
2. a kernel that is right alone, and rounds twice as coarsely as bf16: do the words name its drift?
3. an operator of a few percent of the time, with a kernel that is twice as fast: is the small gain found?
4. the same kernels in other models.
5. operators swapped with themselves, in the time that is left: at most one swap of 20 can have an effect. A swap is
   three rounds, drawn at random from all evaluations of the original and of the model with the operator as its kernel,
   and there are no more swaps than evaluations.

It prints a line and writes the file after each of them. Evaluations that two effects have in common are made once, and
workers import transformers once (`KQUEUE_PRELOAD`). `--lane cpu` makes the models small, for a trial without a GPU,
whose figures mean nothing. transformers must be installed (`kqueue[effect]`). The exit status is 0 only if each
condition holds for all effects, and none is missing. The file also has the mean seconds of the stages of evaluations.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import queue
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from speed import about, fleet

from kqueue import Client, Request, Verdict
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
#: Modules that workers import once. They cannot write the bytecode.
PRELOAD = [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "mixtral", "vit")]
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
#: Keeps 6 of the 7 bits of a bf16's fraction.
COARSE = "y = ((y.contiguous().view(torch.int32) + 0x10000) & -0x20000).view(torch.float32); return"
#: The operator and the forward of each kernel.
KERNELS = {
    "fused_rms_norm": ("rms_norm", "return torch.nn.functional.rms_norm(x, x.shape[1:], self.weight, 1e-6)"),
    "triton_rms_norm": (
        "rms_norm",
        (
            "x = x.contiguous(); out = torch.empty_like(x); n = x.shape[1]; normalize[(x.shape[0],)]"
            "(x, self.weight, out, n, BLOCK=triton.next_power_of_2(n), num_warps=8); return out"
        ),
    ),
    "eager_silu": ("silu", "return x * torch.sigmoid(x)"),
    "halved_gelu": ("gelu", "return torch.cat([torch.nn.functional.gelu(half) for half in x.chunk(2)])"),
    "wide_layer_norm": (
        "layer_norm",
        (
            "scale = self.norm.weight.float(), self.norm.bias.float(); "
            "return torch.nn.functional.layer_norm(x.float(), x.shape[1:], *scale, 1e-12).to(x.dtype)"
        ),
    ),
    "half_silu": ("slow_silu", "return torch.nn.functional.silu(x)"),
    "coarse_rms_norm": ("rms_norm", OPERATORS["rms_norm"][1].replace("return", COARSE)),
}
#: The measurements in their order: kind, model, kernel, and number of rounds.
MEASURED = (
    ("kernel", "llama", "fused_rms_norm", 3),
    ("kernel", "vision", "halved_gelu", 3),
    ("kernel", "mixture", "triton_rms_norm", 3),
    ("kernel", "vision", "wide_layer_norm", 3),
    ("kernel", "llama", "eager_silu", 3),
    ("named", "llama", "coarse_rms_norm", 1),
    ("small", "llama", "half_silu", 10),
    ("kernel", "llama", "triton_rms_norm", 3),
    ("kernel", "mixture", "fused_rms_norm", 3),
    ("kernel", "mixture", "eager_silu", 3),
)
#: Operators that are swapped with themselves, the number of swaps, and of effects and swaps that are due at once.
ITSELF, SWAPS, AT_ONCE = {"llama": "rms_norm", "mixture": "silu", "vision": "layer_norm"}, 40, 4
ROUNDS = 3
#: End of a Llama whose first activation is computed twice, and whose second one is another.
SLOW = """
class _Slow(torch.nn.Module):
    def forward(self, x):
        torch.nn.functional.silu(x)
        return torch.nn.functional.silu(x)
_Fast = Model
class Model(_Fast):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        for layer, activation in zip(self.model.model.layers, (_Slow(), torch.nn.GELU())):
            layer.mlp.act_fn = activation
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
        for _ in range(min(SWAPS // len(ITSELF) + 1, *map(len, roles.values())) if all(some) else 0):
            found = Ratio.of(*map(draw.choice, some))
            made.append({"model": model, "gain": found if isinstance(found, str) else found[0].model_dump()})
            made[-1]["right"] = not isinstance(found, str) and found[0].low <= 1 <= found[0].high
    return made[:SWAPS]


class Series:
    """Effects, and swaps of operators with themselves, until the time ends."""

    def __init__(self, options: argparse.Namespace, client: Client, folder: Path, begun: float) -> None:
        self.options, self.judge, self.folder, self.begun = options, Judge(client), folder, begun
        is_due = lambda name: any(only in name for only in options.only.split(","))  # noqa: E731
        self.due = [one for one in MEASURED if is_due(" ".join(map(str, one)))]
        self.itself = {model: name for model, name in ITSELF.items() if is_due(f"itself {model} {name}")}
        self.trials = {model: {role: list[Trial]() for role in ("original", "kernel")} for model in self.itself}
        self.records = list[dict[str, Any]]()
        self._lock, self._is_over = threading.Lock(), False

    def run(self) -> dict[str, Any]:
        """Measure until nothing is left, or the time ends. Return the summary."""
        work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        for one in self.due:
            work.put(partial(self.measure, *one))
        for number in range(SWAPS // len(ITSELF) + 1):
            for pair in self.itself.items():
                work.put(partial(self.swap, *pair, number))

        def labor() -> None:
            with suppress(queue.Empty):
                while not self._is_over:
                    work.get_nowait()()

        threads = [threading.Thread(target=labor, daemon=True) for _ in range(AT_ONCE)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, self.begun + self.options.seconds - time.monotonic()))
        with self._lock:
            self._is_over = True
            return self._write()

    def measure(self, kind: str, model: str, kernel: str, rounds: int) -> None:
        """Measure an effect, and print it in a line."""
        record: dict[str, Any] = {"kind": kind, "model": model, "kernel": kernel, "right": False}
        try:
            record |= figures(kind, effect(self.judge, plan(self.folder, self.options.lane, model, kernel, rounds)))
        except Exception as error:  # noqa: BLE001 -- is reported
            record["words"] = [repr(error)]
        with self._lock:
            if not self._is_over:
                self.records.append(record)
                self._write()
                right, words = "right" if record["right"] else "WRONG", "; ".join(map(str.strip, record["words"]))
                print(f"{time.monotonic() - self.begun:.0f} s {right} {kind} {model} {kernel}: {words}", flush=True)

    def swap(self, model: str, operator: str, number: int) -> None:
        """Judge the original once, and the model with the operator as its kernel."""
        made, roles = plan(self.folder, self.options.lane, model, operator, 1), ("original", "kernel")
        with suppress(Exception):  # the fleet has ended
            requests = [made.evaluation(role, next(iter(made.workloads)), number) for role in roles]
            answers = self.judge(requests)
            with self._lock:
                for role, answer in zip(roles, answers, strict=True):
                    self.trials[model][role] += [Trial.of(answer)] if isinstance(answer, Verdict) else []
                if not self._is_over:
                    self._write()

    def _write(self) -> dict[str, Any]:
        """Write the figures to the file, and return their summary."""
        summary: dict[str, Any] = {"about": about(self.options.lane), "slots": self.options.slots}
        summary |= {"seconds": round(time.monotonic() - self.begun, 1)}
        for kind in ("kernel", "small", "named"):
            some = [one["right"] for one in self.records if one["kind"] == kind]
            summary[kind] = {"due": sum(one[0] == kind for one in self.due), "measured": len(some), "right": sum(some)}
        swapped = swaps(self.trials)
        right = sum(one["right"] for one in swapped)
        summary["itself"] = {"due": SWAPS * bool(self.itself), "measured": len(swapped), "right": right}
        summary["evaluations"] = {role: len(some) for role, some in list(self.judge.stages.items())}
        summary["failures"] = dict(self.judge.failures)
        summary["stages"] = {role: means(some) for role, some in list(self.judge.stages.items())}
        raw = {
            model: {role: [(one.category, one.speedup, one.interval) for one in some] for role, some in roles.items()}
            for model, roles in self.trials.items()
        }
        more = {"effects": self.records, "swaps": swapped, "trials": raw}
        self.options.out.write_text(json.dumps(summary | more, indent=1))
        return summary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the file for the figures")
    parser.add_argument("--lane", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=250, help="time after which no more is waited for (250)")
    parser.add_argument("--only", default="", help="measure only those whose name has one of these texts")
    options = parser.parse_args()
    begun = time.monotonic()
    signal.signal(signal.SIGALRM, signal.default_int_handler)  # ends a fleet that does not start
    signal.alarm(int(options.seconds) + 5)
    found = importlib.util.find_spec("transformers")
    if found is None:
        parser.error("transformers is not installed")
    if not Path(importlib.util.cache_from_source(str(found.origin))).exists():
        subprocess.run([sys.executable, "-c", f"import {', '.join(PRELOAD)}"], check=False)
    os.environ["KQUEUE_PRELOAD"] = ",".join(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="kqueue-effect-") as name, fleet(options.lane, options.slots) as client:
        print(f"ready after {time.monotonic() - begun:.0f} s", flush=True)
        signal.alarm(0)
        summary = Series(options, client, Path(name), begun).run()
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
