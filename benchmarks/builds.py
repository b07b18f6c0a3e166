"""Measure the cost of compiling: `python benchmarks/builds.py --backend cpp|cuda [--count N] [--slots N] [--out FILE]`.

The kernels use `load_inline` in KernelBench's form, with default headers, and all differ. It measures

- plain torch: a fresh `python` for each kernel, one after the other, which compiles the kernel and calls it once.
- single kernels on an idle fleet: each compiled for the first time, and the same again.
- a batch of kernels on that fleet: all compiled for the first time, and the same again.

The exit status is 0 if all verdicts are `passed`. The result is JSON, on stdout or in FILE. Each figure is printed to
stderr when it is known. Latency is the time from submission to verdict, including the queue, the checks and the timing.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kqueue import Category, Client, Request, Verdict
from kqueue.config import load
from kqueue.local.fleet import LocalFleet

PROBLEM = """
import torch
import torch.nn as nn
class Model(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x)
def get_inputs():
    return [torch.randn(256, 1024)]
def get_init_inputs():
    return []
"""
TOP = """
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline
"""
CUDA = """
cuda_source = '''
#include <torch/extension.h>
#include <cuda_runtime.h>

__global__ void swish_{i}_kernel(const float* x, float* out, int size) {{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < size) {{
        out[i] = x[i] / (1.0f + expf(-x[i]));
    }}
}}

torch::Tensor swish_{i}(torch::Tensor x) {{
    auto size = x.numel();
    auto out = torch::empty_like(x);
    const int block_size = {block};
    swish_{i}_kernel<<<(size + block_size - 1) / block_size, block_size>>>(
        x.data_ptr<float>(), out.data_ptr<float>(), size);
    return out;
}}
'''
extension = load_inline(
    name="swish_{i}",
    cpp_sources="torch::Tensor swish_{i}(torch::Tensor x);",
    cuda_sources=cuda_source,
    functions=["swish_{i}"],
)
"""
CPP = """
cpp_source = '''
#include <cmath>
torch::Tensor swish_{i}(torch::Tensor x) {{
    auto out = torch::empty_like(x);
    const float* from = x.data_ptr<float>();
    float* to = out.data_ptr<float>();
    const int64_t block_size = {block};
    for (int64_t i = 0; i < x.numel(); i += block_size) {{
        for (int64_t j = i; j < std::min(i + block_size, x.numel()); j++) {{
            to[j] = from[j] / (1.0f + std::exp(-from[j]));
        }}
    }}
    return out;
}}
'''
extension = load_inline(name="swish_{i}", cpp_sources=cpp_source, functions=["swish_{i}"])
"""
BOTTOM = """
class ModelNew(nn.Module):
    def forward(self, x):
        return extension.swish_{i}(x)
"""
#: Code that plain torch runs after the kernel's source.
CALL = """
device = "{device}"
ModelNew().to(device)(torch.randn(256, 1024, device=device)).sum().item()
"""


def kernels(backend: str, first: int, count: int) -> list[str]:
    """Return ``count`` different sources, numbered from ``first``."""
    middle = CUDA if backend == "cuda" else CPP
    numbers = range(first, first + count)
    return [(TOP + middle + BOTTOM).format(i=i, block=(64, 128, 256, 512)[i % 4]) for i in numbers]


def plain(sources: list[str], backend: str) -> list[float]:
    """Compile and call each kernel in a fresh process. Return the seconds of each."""
    device = "cuda" if backend == "cuda" else "cpu"
    seconds: list[float] = []
    for source in sources:
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder, "kernel.py")
            script.write_text(source + CALL.format(device=device))
            # A fleet also finds programs in the interpreter's folder, such as ninja.
            path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
            begun = time.monotonic()
            subprocess.run(
                [sys.executable, str(script)],
                env=os.environ | {"TORCH_EXTENSIONS_DIR": folder, "PATH": path},
                stdout=subprocess.DEVNULL,
                check=True,
            )
            seconds.append(time.monotonic() - begun)
    return seconds


def requests(sources: list[str], backend: str) -> list[Request]:
    return [Request(problem=PROBLEM, kernel=source, backend=backend) for source in sources]


def one_by_one(client: Client, wanted: list[Request]) -> tuple[list[float], list[Verdict]]:
    """Judge kernels one after the other. Return the seconds of each, and the verdicts."""
    seconds: list[float] = []
    verdicts: list[Verdict] = []
    for request in wanted:
        begun = time.monotonic()
        verdicts.append(client.evaluate(request, timeout=600))
        seconds.append(time.monotonic() - begun)
    return seconds, verdicts


def batch(client: Client, wanted: list[Request]) -> tuple[float, list[Verdict]]:
    """Judge kernels together. Return the seconds until the last verdict, and the verdicts."""
    begun = time.monotonic()
    verdicts = client.wait_all(client.submit_batch(wanted), timeout=3600)
    return time.monotonic() - begun, verdicts


def builds_of(verdicts: list[Verdict]) -> dict[str, Any]:
    """Return the origins and the median time of the builds, and the verdicts that are not `passed`."""
    builds = [verdict.evidence.build for verdict in verdicts]
    wrong = [f"{v.category}: {v.message[:200]}" for v in verdicts if v.category is not Category.PASSED]
    return {
        "from": {origin: sum(b is not None and b.where == origin for b in builds) for origin in ("builder", "store")},
        "build_s": round(statistics.median([b.seconds for b in builds if b is not None] or [0]), 3),
        "not_passed": wrong,
    }


def measure(client: Client, backend: str, count: int, plainly: int) -> dict[str, Any]:
    """Return all figures: seconds, and kernels per minute. Print each when it is known."""
    result: dict[str, Any] = {}

    def record(name: str, value: object) -> None:
        result[name] = value
        print(name, json.dumps(value), file=sys.stderr, flush=True)

    # The first evaluation of a problem times its reference too.
    one_by_one(client, requests(kernels(backend, 0, 1), backend))
    few = kernels(backend, 100, plainly)
    record("plain_s", [round(s, 2) for s in plain(few, backend)])
    for name in ("cold", "seen"):
        seconds, verdicts = one_by_one(client, requests(few, backend))
        record(f"{name}_s", [round(s, 2) for s in seconds])
        record(f"{name}_verdicts", builds_of(verdicts))
    ratio = statistics.median(result["cold_s"]) / statistics.median(result["plain_s"])
    record("cold_over_plain", round(ratio, 3))
    many = requests(kernels(backend, 1000, count), backend)
    for name in ("cold", "seen"):
        # Known kernels are judged four times, because one round is short.
        wanted = many if name == "cold" else many * 4
        seconds, verdicts = batch(client, wanted)
        figures = {
            "kernels": len(wanted),
            "seconds": round(seconds, 2),
            "per_minute": round(60 * len(wanted) / seconds, 1),
        }
        record(f"batch_{name}", figures | builds_of(verdicts))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("cpp", "cuda"), default=None, help="by default cuda on a host with GPUs")
    parser.add_argument("--count", type=int, default=16, help="kernels in a batch")
    parser.add_argument("--plain", type=int, default=3, help="kernels for plain torch and the idle fleet")
    parser.add_argument("--slots", type=int, default=None, help="slots of the GPU, or of the CPU")
    parser.add_argument("--out", type=Path, default=None, help="file for the result")
    options = parser.parse_args()
    has_gpu = Path("/dev/nvidiactl").exists()
    backend = options.backend or ("cuda" if has_gpu else "cpp")
    on_gpu = backend == "cuda"
    slots = options.slots or (8 if on_gpu else os.cpu_count() or 1)
    chosen: dict[str, Any] = (
        {"slots_per_gpu": slots, "cpu_slots": 0} if on_gpu else {"gpus": "none", "cpu_slots": slots}
    )
    with tempfile.TemporaryDirectory(prefix="kqueue-builds-") as folder:
        root = Path(folder)
        root.chmod(0o711)
        config = load(home=root / "home", scratch=root / "scratch", reuse=False, probe_share=0, **chosen)
        with LocalFleet(config, durable=False) as fleet, fleet.client() as client:
            result = measure(client, backend, options.count, options.plain)
    spec = importlib.util.find_spec("torch")
    version = Path(spec.origin).with_name("version.py").read_text() if spec is not None and spec.origin else ""
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "backend": str(backend),
        "slots": slots,
        "cores": os.cpu_count(),
        "torch": next((line.split("'")[1] for line in version.splitlines() if line.startswith("__version__")), None),
    } | result
    text = json.dumps(result, indent=2)
    if options.out is not None:
        options.out.write_text(text + "\n")
    print(text)
    every = [result[name]["not_passed"] for name in ("cold_verdicts", "seen_verdicts", "batch_cold", "batch_seen")]
    return 1 if any(every) else 0


if __name__ == "__main__":
    sys.exit(main())
