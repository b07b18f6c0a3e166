"""The report of an autopsy as data and as text, and ``repro.py``, which reproduces the failure.

``repro.py`` is a standalone program with torch and the kernel's own imports. kqueue only writes it and never runs it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from enum import StrEnum
from importlib import resources
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from kqueue import passes
from kqueue.categories import Blame, Category
from kqueue.contract import Request, Result
from kqueue.evidence import Facts, InputTensor
from kqueue.feedback import first_wrong
from kqueue.text import clean


class Ended(StrEnum):
    """The reason why an autopsy ended."""

    REFUSED = "refused"
    """The failure needs no autopsy."""
    NOT_AGAIN = "not_again"
    """The kernel did not fail in the same way when it was judged again."""
    SMALLEST = "smallest"
    """There is nothing smaller to try."""
    EVALUATIONS = "evaluations"
    """The maximum number of evaluations was reached."""
    TIME = "time"
    """The time limit was reached."""
    INTERRUPTED = "interrupted"
    """The user or the server ended it."""


class Change(BaseModel):
    """A number of the problem's source that was reduced."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    line: int
    """Line of the problem's source, from 1."""
    name: str
    """The constant or function that contains it."""
    before: int
    """Its value in the original problem."""
    after: int
    """Its value in the smallest failing problem."""


class Report(BaseModel):
    """The results of an autopsy."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    category: Category
    """The category of the kernel's failure."""
    message: str
    """The message of the verdict on the smallest failing problem."""
    ended: Ended
    """Reason why the autopsy ended."""
    refusal: str | None
    """Reason why the failure has no autopsy. None if it has one."""
    before: tuple[InputTensor, ...] | None
    """The problem's inputs. None where they are unknown."""
    after: tuple[InputTensor, ...] | None
    """Inputs of the smallest failing problem. None where none failed."""
    changes: tuple[Change, ...]
    """The numbers that were reduced."""
    fill: str | None
    """The values of floating inputs. None where they come from the judge's seeds."""
    kept: tuple[int, int] | None
    """Range of the elements of floating inputs that are not 0, counted through all of them. None for all."""
    seeds: tuple[int, ...]
    """Seeds of the input sets. Empty for the judge's own, which are secret."""
    facts: Facts
    """Facts of the verdict on the smallest failing problem, with the first wrong values."""
    evaluations: int
    """Number of evaluations."""
    seconds: float
    """Elapsed time in seconds."""
    problem: str | None
    """Source of the smallest failing problem. None where none failed."""
    repro: str | None
    """Source of a program that shows the failure. None where none failed."""

    @property
    def elements_before(self) -> int | None:
        """Number of elements of the problem's inputs. None where it is unknown."""
        return _elements(self.before)

    @property
    def elements_after(self) -> int | None:
        """Number of elements of the inputs of the smallest failing problem. None where none failed."""
        return _elements(self.after)

    @property
    def judged(self) -> bool:
        """True if the failure is the kernel's, or there is none."""
        return self.category.blame in {Blame.NONE, Blame.CANDIDATE}

    @property
    def found(self) -> bool:
        """True if there is a program that shows the failure."""
        return self.repro is not None

    def summary(self) -> dict[str, Any]:
        """Return the report as a JSON-safe record, with derived values and without sources."""
        record = self.model_dump(mode="json", exclude={"problem", "repro"})
        return record | {"elements_before": self.elements_before, "elements_after": self.elements_after}

    def lines(self) -> Iterator[str]:
        """Yield the report as text. Clean it before it is shown, because it quotes the kernel's output."""
        if self.refusal is not None:
            yield f"no autopsy: {self.refusal}"
            return
        if self.after is None:
            why = (
                "the kernel did not fail in the same way when it was judged again unchanged. The failure can"
                " depend on chance, on time, or on other processes"
                if self.ended is Ended.NOT_AGAIN
                else "it ended before the kernel was judged again"
            )
            yield f"{self.category}: no autopsy: {why} ({self.evaluations} evaluation{'s' * (self.evaluations != 1)})"
            return
        assert self.before is not None
        yield f"{self.category}: {self.message}"
        yield f"inputs: {words_of(self.before)} -> {words_of(self.after)}"
        yield f"elements: {self.elements_before} -> {self.elements_after}"
        for change in self.changes:
            yield f"  line {change.line} ({change.name}): {change.before} -> {change.after}"
        if not self.seeds:
            yield "values: drawn by the judge's secret seeds. No fixed inputs were found on which it fails"
        else:
            sets = f"{len(self.seeds)} input sets, one after the other" if len(self.seeds) > 1 else "one input set"
            only = (
                ""
                if self.kept is None
                else f", elements {self.kept[0]} to {self.kept[1] - 1} only, all other elements 0"
            )
            yield f"values: {self.fill}{only}, {sets}"
        yield from first_wrong(self.facts)
        why = {
            Ended.SMALLEST: "nothing smaller was found to fail",
            Ended.EVALUATIONS: "the evaluations were used up before the smallest problem was found",
            Ended.TIME: "the time was over before the smallest problem was found",
            Ended.INTERRUPTED: "it was ended before the smallest problem was found",
        }[self.ended]
        yield f"{self.evaluations} evaluations, {self.seconds:.1f} s: {why}"


def _elements(tensors: tuple[InputTensor, ...] | None) -> int | None:
    return None if tensors is None else sum(math.prod(tensor.shape) for tensor in tensors)


def words_of(tensors: tuple[InputTensor, ...]) -> str:
    """Return shapes and data types in one line."""
    return ", ".join(f"{list(tensor.shape)} {tensor.dtype}" for tensor in tensors) or "no tensors"


#: Number of input sets in repro.py for a problem that draws its inputs without fixed seeds.
_SETS: Final = 16
#: Seed of the weights of all evaluations, if the request gives none.
SEED: Final = 42
_QUOTES: Final = "'''"


def program(request: Request, problem: str, result: Result, seeds: tuple[int, ...], words: str) -> str:
    """Return the program that reproduces a failure. It exits with 1 if the kernel fails, and with 0 otherwise.

    The ``seeds`` are empty for the judge's own. The ``words`` say how the problem was shrunk.
    """
    settings, facts = request.settings, result.facts
    # The evidence names TF32 on a GPU only.
    on_gpu = result.evidence.tf32 is not None
    given = result.evidence.tolerance
    listed = [one and (one.atol, one.rtol, one.by) for one in result.evidence.tolerances or (given,)]
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
        "TOLERANCE": listed if result.evidence.tolerances else listed[0],
        "CHECKED": result.evidence.checker is not None,
        "CALLS": result.evidence.calls,
        "WORLD": request.ranks,
        "BACKWARD": settings.backward or passes.asked_by(problem),
        "STRICT": settings.comparison == "strict",
        "LIMIT_S": getattr(settings.deadlines, f"{result.phase}_s", 60.0),
        "HOST_BYTES": settings.limits.host_memory_bytes,
        "OUTPUT_BYTES": settings.limits.output_bytes,
        "GPU_BYTES": facts.allowed_bytes,
    }
    template = resources.files("kqueue.features.autopsy").joinpath("repro_template.txt").read_text(encoding="utf-8")
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
