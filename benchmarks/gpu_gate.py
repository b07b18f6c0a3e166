"""Try the judge on a GPU before a change of it lands: `make gpu-gate`, in at most 8 minutes with an empty `.venv`.

It starts this machine's fleet in a temporary home. Then it

1. judges the corpus's honest controls and the first cheat of each family, and once more, one after another, those
   whose times are compared (tests/integrity).
2. judges the pairs of `repeat.py` and three large problems, each against itself, 10 times.
3. judges the gallery's first kernel of each backend.
4. judges 84 small Triton kernels in one batch, for evaluations per second.

When the fleet has ended it looks for leftovers: processes of candidates, and GPU memory.

The result goes to `results/gpu_gate.json`, with the commit and a digest of `workers/judge`. The program prints each
figure that is worse than in the result before, and the backends whose packages are missing. The exit status is 1 if a
program of the corpus does not end as expected, a kernel of a pair or of the gallery does not pass, a spread is outside
its bound, or something is left over. `--is-current` runs nothing and warns if `workers/judge` has changed since the
committed result.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pynvml
from real import problems
from repeat import pairs, spread
from speed import PATIENCE_S, Kernels, about, fleet, judge

from kqueue import Client, Request
from kqueue.categories import Blame
from kqueue.config import load
from tests.integrity.corpus import Judgement, Program, programs
from tests.integrity.run import judge_programs, report_unexpected

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "gpu_gate.json"
#: Large problems of `benchmarks/problems`, each with at least 1 GiB for a call.
LARGE = r"level2/(conv_transpose2d_gelu_group_norm|conv2d_mish_mish|conv3d_relu)"
ROUNDS = 10
SMALL_KERNELS = 84
#: Bounds of the distance from 1 of the median speedup of a problem over itself: in general, and as a share of half the
#: width of one interval, which the median of ten exceeds with a chance below 1 in 1000. Below: the minimum share of all
#: intervals that contain the truth. An interval contains it in 95 of 100, so fewer than 85 of 110 have such a chance.
APART, APART_BY_WIDTH = 0.07, 0.65
COVERED = 0.85
#: Relative change of a figure that is called worse.
WORSE = 0.1
#: Bytes of GPU memory that a driver can use for its own purposes.
LEFT_BYTES = 64 << 20


def digest() -> str:
    """Return a digest of the names and contents of `workers/judge`."""
    found = hashlib.sha256()
    for path in sorted((ROOT / "workers" / "judge").rglob("*.py")):
        found.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def chosen_programs() -> Iterator[Program]:
    """Yield the honest controls, and the first program of each family of cheats."""
    families: set[str] = set()
    for program in programs("gpu"):
        if program.is_control or program.family not in families:
            families.add(program.family)
            yield program


def chosen_pairs() -> dict[str, Request]:
    """Return a request for each pair by the pair's name."""
    large = {
        f"itself: {Path(name).stem}": Request(
            problem=source, kernel=f"{source}\n\nModelNew = Model\n", backend="torch", lane="gpu"
        )
        for name, source in problems([ROOT / "benchmarks" / "problems"], LARGE)
    }
    return pairs("gpu") | large


def of_backends() -> list[Request]:
    """Return a request for the first right kernel of each backend in the gallery."""
    good = [entry for entry in Kernels("gpu").entries.values() if entry.name.startswith("good/")]
    return list({entry.backend: entry.request("gpu") for entry in reversed(good)}.values())


def measure(client: Client) -> Iterator[tuple[str, dict[str, Any]]]:
    """Judge everything. Yield the name and the figures of each part. A failure is a line in ``failures``."""
    corpus = list(chosen_programs())
    rows = judge_programs(client, "gpu", corpus, None, merge=False)["programs"]
    report_unexpected(corpus, rows)
    found = [f"{name}: {row['judgement']}" for name, row in rows.items() if not Judgement(row["judgement"]).good]
    controls = sum(program.is_control for program in corpus)
    yield "corpus", {"controls": controls, "cheats": len(corpus) - controls, "failures": found}

    made = chosen_pairs()
    requests = [made[name] for _ in range(ROUNDS) for name in made]
    client.wait_all(client.submit_batch(list(made.values())), timeout=PATIENCE_S)
    verdicts, _ = judge(client, requests)
    figures = {
        name: spread(verdicts[i :: len(made)], 1.0 if name.startswith("itself") else None)
        for i, name in enumerate(made)
    }
    found = [verdict.message for verdict in verdicts if not verdict.passed]
    found += [
        f"{name}: the median speedup of {ROUNDS} is {pair['speedup'][1]}"
        for name, pair in figures.items()
        if name.startswith("itself") and abs(pair["speedup"][1] - 1) > max(APART, APART_BY_WIDTH * pair["width"])
    ]
    covered = sum(pair.get("covered", 0.0) for pair in figures.values()) / len(figures)
    found += [f"{covered:.0%} of the intervals contain the truth"] if covered < COVERED else []
    yield "pairs", {"covered": round(covered, 3), "pairs": figures, "failures": found}

    verdicts, _ = judge(client, of_backends())
    missing = [one.backend for one in verdicts if "is not installed" in one.message and one.blame is Blame.FLEET]
    found = [f"{one.backend}: {one.message}" for one in verdicts if not one.passed and one.backend not in missing]
    judged = sorted(one.backend for one in verdicts if one.backend not in missing)
    yield "backends", {"backends": judged, "missing": missing, "failures": found}

    kernels = Kernels("gpu")
    names = kernels.right("triton")
    judge(client, [kernels.new(name) for name in islice(names, SMALL_KERNELS // 2)])
    verdicts, rate = judge(client, [kernels.new(name) for name in islice(names, SMALL_KERNELS)])
    yield "rate", rate | {"failures": [verdict.message for verdict in verdicts if not verdict.passed]}


def used_bytes() -> int:
    """Return the used memory of all GPUs in bytes."""
    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    return sum(int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles)


def candidates() -> list[str]:
    """Return pid, name and uid of the running candidates, which have a known name or uid."""
    first, found = load().candidate_uid, list[str]()
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
        except OSError:
            continue
        uid = int(fields["Uid"].split()[0])
        if fields["State"][0] not in "ZX" and (fields["Name"] == "kq-candidate" or first <= uid < first + 5120):
            found.append(f"candidate {status.parent.name} {fields['Name']} of uid {uid}")
    return found


def worse(now: dict[str, Any], before: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each figure that is worse than in the result before."""
    if now["rate"]["per_s"] < (1 - WORSE) * before["rate"]["per_s"]:
        yield f"evaluations per second: {before['rate']['per_s']} before, {now['rate']['per_s']} now"
    for name, pair in now["pairs"]["pairs"].items():
        old = before["pairs"]["pairs"].get(name, {})
        if pair.get("width", 0.0) > old.get("width", 1.0) + WORSE / 2:
            yield f"{name}: half of an interval is {old['width']:.1%} of the speedup before, {pair['width']:.1%} now"
    if now["seconds"] > (1 + WORSE) * before["seconds"]:
        yield f"seconds in all: {before['seconds']} before, {now['seconds']} now"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=6, help="slots per GPU (6)")
    parser.add_argument("--out", type=Path, default=RESULT, help="the file for the result")
    parser.add_argument("--is-current", action="store_true", help="only compare the committed result with the tree")
    options = parser.parse_args()
    before = json.loads(RESULT.read_text()) if RESULT.exists() else None
    if options.is_current:
        if before is None or before["judge"] != digest():
            print(f"warning: workers/judge has changed since {RESULT.name}. Run make gpu-gate on a GPU")
        return 0
    memory, begun = used_bytes(), time.monotonic()
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    result: dict[str, Any] = {"about": about("gpu"), "commit": head.strip() or None, "judge": digest()}
    with fleet("gpu", options.slots) as client:
        for name, figures in measure(client):
            result[name] = figures
            print(f"{time.monotonic() - begun:.0f} s: {name} {json.dumps(figures)}", flush=True)
    left = candidates()
    left += [f"{more >> 20} MiB of GPU memory"] if (more := used_bytes() - memory) > LEFT_BYTES else []
    result |= {"left": {"failures": left}, "seconds": round(time.monotonic() - begun)}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for line in worse(result, before) if before is not None else ():
        print(f"worse: {line}")
    failures = [f"{part}: {line}" for part in result if isinstance(result[part], dict)
                for line in result[part].get("failures", ())]  # fmt: skip
    print(f"{len(failures)} failures in {result['seconds']} s", *failures, sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    sys.exit(main())
