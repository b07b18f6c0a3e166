"""``repro.py``, a standalone program that reproduces a failure with torch and the kernel's own imports.

kqueue only writes it and never runs it.
"""

from __future__ import annotations

import re
from importlib import resources
from typing import Final

from kqueue import passes
from kqueue.contract import Request, Result
from kqueue.text import clean

#: Number of input sets in repro.py for a problem that draws its inputs without fixed seeds.
_SETS: Final = 16
#: Seed of the weights of all evaluations, if the request gives none.
SEED: Final = 42
_QUOTES: Final = "'''"


def render(request: Request, problem: str, result: Result, seeds: tuple[int, ...], words: str) -> str:
    """Return the program that reproduces a failure. It exits with 1 if the kernel fails, and with 0 otherwise.

    Args:
        seeds: seeds of the problem's input sets. Empty for the judge's own.
        words: text on how the problem was shrunk.
    """
    settings, facts = request.settings, result.facts
    # Only on a GPU does the evidence contain a memory plan.
    on_gpu = result.evidence.gpu_memory is not None
    given = result.evidence.tolerance
    summary = [f"The judge's verdict: {result.category}: {result.message}", *words.splitlines()]
    if not seeds:
        summary.append(
            "The judge's inputs are secret. This file draws different ones, so the failure does not always show."
        )
    values_by_name = {
        "SUMMARY": "\n".join(summary),
        "CATEGORY": str(result.category),
        "DEVICE": "cuda" if on_gpu else "cpu",
        "PRECISION": {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[settings.precision],
        "KEEPS_FLOAT64": settings.keeps_float64,
        "TF32": settings.tf32,
        "SEED": settings.seed,
        "SETS": len(seeds) or _SETS,
        "TOLERANCE": None if given is None else (given.atol, given.rtol, given.by),
        "BACKWARD": settings.backward or passes.asked_by(problem),
        "STRICT": settings.comparison == "strict",
        "LIMIT_S": getattr(settings.deadlines, f"{result.phase}_s", 60.0),
        "HOST_BYTES": settings.limits.host_memory_bytes,
        "OUTPUT_BYTES": settings.limits.output_bytes,
        "GPU_BYTES": facts.allowed_bytes,
    }
    template = resources.files("kqueue.autopsy").joinpath("repro_template.txt").read_text(encoding="utf-8")
    head, mark, rest = template.partition("# @@VALUES@@\n")
    assert mark
    values = "".join(f"{name} = {value!r}\n" for name, value in values_by_name.items() if name != "SUMMARY")
    source = head.replace("@@SUMMARY@@", clean(values_by_name["SUMMARY"]).replace("\\", "\\\\").replace('"""', "'''"))
    # Both in one pass, because a source can contain the other one's mark.
    sources = {"@@PROBLEM@@": _literal(problem), "@@KERNEL@@": _literal(request.kernel)}
    return source + values + re.sub("|".join(sources), lambda mark: sources[mark[0]], rest)


def _literal(source: str) -> str:
    """Return a source as a readable literal if possible."""
    if _QUOTES in source or source.endswith(("'", "\\")) or clean(source) != source:
        lines = ",\n".join(f"    {line!r}" for line in source.split("\n"))
        return f'"\\n".join([\n{lines},\n])'
    return f"r{_QUOTES}{source}{_QUOTES}"
