"""Measure effects on models of transformers: `python benchmarks/effect.py --out FILE [--slots N] [--seconds N]`.

It starts a fleet and measures, at once and until `--seconds` have passed:

- kernels of five operators in the models of the three recipes: do prediction and measurement agree within 2 points?
- ten swaps of an operator with itself: at most one can have an effect.
- an operator of a few percent of the time, with a kernel that is twice as fast: is the small gain found?

Only the first workload of each recipe is measured. `--lane cpu` makes the models small, for a trial without a GPU,
whose figures mean nothing. transformers must be installed (`kqueue[effect]`). The exit status is 0 only if each
condition holds for all effects, and none is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from speed import about, fleet

from kqueue import Client, Request, Verdict
from kqueue.errors import InvalidRequest
from kqueue.features.effect import effects
from kqueue.features.effect.effects import Effect, Plan, effect
from kqueue.judging import guess_backend

#: Rows and widths of the inputs of norms and of activations, by model, and for small models.
NORMS = {"llama": (2048, 2048), "mixture": (2048, 1024), "vision": (64 * 197, 768)}
ACTIVATIONS = {"llama": (2048, 5632), "mixture": (4096, 3584), "vision": (64 * 197, 3072)}
SMALL_ROWS = {"llama": (64, 64), "mixture": (64, 128), "vision": (10, 10)}
#: Changes that make models small.
SMALL = {
    "= 2048, 5632, 8, 32, 32000": "= 64, 96, 2, 8, 200",
    "= 1024, 3584, 6, 16, 32000": "= 64, 96, 2, 8, 200",
    '"tokens": 2048': '"tokens": 64',
    '"image_size": 224}': '"image_size": 32, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, '
    '"num_attention_heads": 4}',
    '"images": 64': '"images": 2',
}
#: A problem by the body of its class.
PROBLEM = """
import torch
class Model(torch.nn.Module):
{body}
def get_inputs():
    return [torch.randn({rows}, {width})]
def get_init_inputs():
    return [{width}]
"""
PLAIN = """    def __init__(self, width):
        super().__init__()
    def forward(self, x):
        {}
"""
RMS = """    def __init__(self, width):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))
    def forward(self, x):
        {}
"""
LAYER = """    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width, eps=1e-12)
    def forward(self, x):
        {}
"""
#: Bodies of operators, as transformers has them.
OPERATORS = {
    "rms_norm": RMS.format(
        "y = x.to(torch.float32)\n"
        "        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)\n"
        "        return self.weight * y.to(x.dtype)"
    ),
    "silu": PLAIN.format("return torch.nn.functional.silu(x)"),
    "layer_norm": LAYER.format("return self.norm(x)"),
    "gelu": PLAIN.format("return torch.nn.functional.gelu(x)"),
    "slow_silu": PLAIN.format("torch.nn.functional.silu(x)\n        return torch.nn.functional.silu(x)"),
}
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
#: Kernels: operator, text before the class, and its body.
KERNELS = {
    "fused_rms_norm": (
        "rms_norm",
        "",
        RMS.format("return torch.nn.functional.rms_norm(x, x.shape[1:], self.weight, 1e-6)"),
    ),
    "triton_rms_norm": (
        "rms_norm",
        TRITON,
        RMS.format(
            "x = x.contiguous()\n        out = torch.empty_like(x)\n        n = x.shape[1]\n"
            "        normalize[(x.shape[0],)](x, self.weight, out, n, BLOCK=triton.next_power_of_2(n), num_warps=8)\n"
            "        return out"
        ),
    ),
    "eager_silu": ("silu", "", PLAIN.format("return x * torch.sigmoid(x.float()).to(x.dtype)")),
    "eager_gelu": ("gelu", "", PLAIN.format("return 0.5 * x * (1 + torch.erf(x.float() * 0.5**0.5)).to(x.dtype)")),
    "eager_layer_norm": (
        "layer_norm",
        "",
        LAYER.format(
            "y = x.float()\n        y = y - y.mean(-1, keepdim=True)\n"
            "        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-12)\n"
            "        return (y * self.norm.weight + self.norm.bias).to(x.dtype)"
        ),
    ),
    "half_silu": ("slow_silu", "", OPERATORS["silu"]),
}
#: Kernels that are measured in each model.
MEASURED = {
    "llama": ("fused_rms_norm", "triton_rms_norm", "eager_silu"),
    "mixture": ("fused_rms_norm", "triton_rms_norm", "eager_silu"),
    "vision": ("eager_gelu", "eager_layer_norm"),
}
#: Operators that are swapped with themselves, and how often.
ITSELF = {("llama", "rms_norm"): 4, ("mixture", "silu"): 3, ("vision", "layer_norm"): 3}
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
    operator, head, body = KERNELS.get(kernel, (kernel, "", OPERATORS.get(kernel, "")))
    is_norm = operator in ("rms_norm", "layer_norm")
    rows, width = (NORMS if is_norm else ACTIVATIONS)[model]
    recipe = (Path(effects.__file__).parent / "recipes" / f"{model}.py").read_text()
    if lane == "cpu":
        rows, width = SMALL_ROWS[model][not is_norm], 64 if is_norm else 96
        for old, new in SMALL.items():
            recipe = recipe.replace(old, new)
    if operator == "slow_silu":
        recipe += SLOW
    file = folder / f"{model}-{operator}.py"
    file.write_text(recipe)
    source = f"import torch\n{head}\nclass ModelNew(torch.nn.Module):\n{body}"
    request = Request.model_validate(
        {
            "problem": PROBLEM.format(body=OPERATORS[operator], rows=rows, width=width),
            "kernel": source,
            "backend": guess_backend(source),
            "lane": lane,
            "kernel_label": kernel,
            "settings": {"precision": "bf16"},
        }
    )
    made = Plan.of(request, str(file), rounds)
    return replace(made, workloads=dict([next(iter(made.workloads.items()))]))


class Judge:
    """A fleet, which judges each kernel alone and each drift only once."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._known: dict[tuple[str, str], list[Verdict | InvalidRequest]] = {}
        self._lock = threading.Lock()
        self.evaluations = 0

    def __call__(self, requests: list[Request]) -> list[Verdict | InvalidRequest]:
        """Return the verdicts of requests in their order."""
        key = requests[0].problem_hash, requests[0].kernel_hash
        is_known = len(requests) == 1
        with self._lock:
            self.evaluations += 0 if is_known and key in self._known else len(requests)
            known = self._known.get(key) if is_known else None
        if known is None:
            known = self._client.evaluate_batch(requests)
            with self._lock:
                self._known[key] = known
        return known


def figures(kind: str, found: Effect) -> dict[str, Any]:
    """Return an effect as a record."""
    [one] = found.workloads or [effects.Workload(name="", ended=str(found.verdict["message"]))]
    gains = {name: getattr(one, name) and getattr(one, name).model_dump() for name in ("longer", "operator")}
    gains |= {name: getattr(one, name) and getattr(one, name).model_dump() for name in ("predicted", "measured")}
    drift = one.drift and one.drift.model_dump()
    known = {"kind": kind, "model": found.model, "kernel": found.kernel, "time_ms": one.time_ms, **gains}
    return known | {"drift": drift, "ended": one.ended or one.unpredicted, "words": list(found.words())}


def is_right(record: dict[str, Any]) -> bool:
    """Return whether an effect meets its condition."""
    predicted, measured = record["predicted"], record["measured"]
    if predicted is None or measured is None:
        return False
    if record["kind"] == "itself":
        return measured["low"] <= 1 <= measured["high"]
    near = abs(predicted["value"] - measured["value"]) <= 0.02
    return near and (record["kind"] != "small" or measured["low"] > 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the file for the figures")
    parser.add_argument("--lane", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--slots", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=140, help="time after which no more is waited for (140)")
    parser.add_argument("--only", default="", help="measure only those whose name has this text")
    options = parser.parse_args()
    begun, records, done = time.monotonic(), list[dict[str, Any]](), SimpleQueue[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="kqueue-effect-") as name, fleet(options.lane, options.slots) as client:
        due = [("itself", *of, 1) for of, number in ITSELF.items() for _ in range(number)]
        due += [("small", "llama", "half_silu", 3)]
        due += [("kernel", model, kernel, 1) for model, kernels in MEASURED.items() for kernel in kernels]
        due = [one for one in due if options.only in " ".join(map(str, one))]
        judge = Judge(client)

        def measure(kind: str, model: str, kernel: str, rounds: int) -> None:
            try:
                found = effect(judge, plan(Path(name), options.lane, model, kernel, rounds))
                done.put(figures(kind, found))
            except Exception as error:  # noqa: BLE001 -- is reported
                done.put({"kind": kind, "model": model, "kernel": kernel, "ended": repr(error)})

        for one in due:
            threading.Thread(target=measure, args=one, daemon=True).start()
        while len(records) < len(due) and time.monotonic() - begun < options.seconds:
            try:
                records.append(done.get(timeout=1))
            except Empty:
                continue
            print(json.dumps({name: value for name, value in records[-1].items() if name != "words"}), flush=True)
        summary: dict[str, Any] = {"about": about(options.lane), "slots": options.slots, "due": len(due)}
        summary |= {"seconds": round(time.monotonic() - begun, 1), "evaluations": judge.evaluations}
        for kind in ("kernel", "itself", "small"):
            some = [one for one in records if one["kind"] == kind]
            summary[kind] = {"measured": len(some), "right": sum("predicted" in one and is_right(one) for one in some)}
        options.out.write_text(json.dumps(summary | {"effects": records}, indent=1) + "\n")
        print(json.dumps(summary), flush=True)
        missing = len(due) - len(records)
        wrong = sum(summary[kind]["measured"] - summary[kind]["right"] for kind in ("kernel", "small"))
        odd = summary["itself"]["measured"] - summary["itself"]["right"]
    return 1 if missing or wrong or odd > 1 else 0


if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    sys.exit(main())
