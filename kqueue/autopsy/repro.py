"""``repro.py``: a file that needs torch, and what the kernel imports, and fails by itself.

It is text here. kqueue never runs it.
"""

from __future__ import annotations

import re
from importlib import resources
from typing import Final

from kqueue.contract import Request, Result
from kqueue.text import clean

#: Input sets of a problem whose inputs are drawn by the problem's own code, under seeds that repro.py chooses.
_SETS: Final = 16
_QUOTES: Final = "'''"


def render(request: Request, problem: str, result: Result, seeds: tuple[int, ...], words: str) -> str:
    """Return the program that shows a failure. It ends with 1 if the kernel fails, with 0 if it does not.

    Args:
        request: the kernel's source, and how it was judged.
        problem: source of the smallest failing problem.
        result: what the judge said on that.
        seeds: those of the problem's input sets; empty for the judge's own.
        words: what was done to the problem.
    """
    settings, facts = request.settings, result.facts
    # On a CPU nothing is planned of a GPU's memory.
    on_gpu = result.evidence.gpu_memory is not None
    given = result.evidence.tolerance
    told = [f"The judge said: {result.category}: {result.message}", *words.splitlines()]
    if not seeds:
        told.append("The judge's inputs are secret. This file draws others by the same code: it may not fail.")
    known = {
        "TOLD": "\n".join(told),
        "CATEGORY": str(result.category),
        "DEVICE": "cuda" if on_gpu else "cpu",
        "PRECISION": {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[settings.precision],
        "KEEPS_FLOAT64": settings.keeps_float64,
        "TF32": settings.tf32,
        "SEED": settings.seed,
        "SETS": len(seeds) or _SETS,
        "TOLERANCE": None if given is None else (given.atol, given.rtol, given.by),
        "STRICT": settings.comparison == "strict",
        "LIMIT_S": getattr(settings.deadlines, f"{result.phase}_s", 60.0),
        "HOST_BYTES": settings.limits.host_memory_bytes,
        "OUTPUT_BYTES": settings.limits.output_bytes,
        "GPU_BYTES": facts.allowed_bytes,
    }
    template = resources.files("kqueue.autopsy").joinpath("repro_template.txt").read_text(encoding="utf-8")
    head, mark, rest = template.partition("# @@VALUES@@\n")
    assert mark
    values = "".join(f"{name} = {value!r}\n" for name, value in known.items() if name != "TOLD")
    source = head.replace("@@TOLD@@", clean(known["TOLD"]).replace("\\", "\\\\").replace('"""', "'''"))
    # At once: a source may hold the other's mark.
    sources = {"@@PROBLEM@@": _literal(problem), "@@KERNEL@@": _literal(request.kernel)}
    return source + values + re.sub("|".join(sources), lambda mark: sources[mark[0]], rest)


def _literal(source: str) -> str:
    """Return a source as a literal that people can read, where it can be one."""
    if _QUOTES in source or source.endswith(("'", "\\")) or clean(source) != source:
        lines = ",\n".join(f"    {line!r}" for line in source.split("\n"))
        return f'"\\n".join([\n{lines},\n])'
    return f"r{_QUOTES}{source}{_QUOTES}"
