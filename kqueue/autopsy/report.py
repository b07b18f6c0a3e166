"""What an autopsy found, and its words."""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict

from kqueue.categories import Blame, Category
from kqueue.evidence import Facts, InputTensor, json_number


class Ended(StrEnum):
    """Why an autopsy ended."""

    REFUSED = "refused"
    """The failure needs none."""
    NOT_AGAIN = "not_again"
    """Judged again, the kernel did not fail so."""
    SMALLEST = "smallest"
    """Nothing smaller is left to try."""
    EVALUATIONS = "evaluations"
    """The evaluations were used up."""
    TIME = "time"
    """The time was over."""
    INTERRUPTED = "interrupted"
    """Somebody ended it."""


class Change(BaseModel):
    """A number of the problem's source that was made smaller."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    line: int
    """Line of the problem's source, from 1."""
    name: str
    """The constant or function that it stands in."""
    before: int
    """As the problem has it."""
    after: int
    """As the smallest failing problem has it."""


class Report(BaseModel):
    """What an autopsy found."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    category: Category
    """How the kernel fails."""
    message: str
    """The message of the verdict on the smallest failing problem."""
    ended: Ended
    """Why it ended."""
    refusal: str | None
    """Why the failure needs no autopsy; None if it does."""
    before: tuple[InputTensor, ...] | None
    """The problem's inputs. None where they are unknown."""
    after: tuple[InputTensor, ...] | None
    """Inputs of the smallest failing problem. None where none failed."""
    changes: tuple[Change, ...]
    """The numbers that were made smaller."""
    fill: str | None
    """The values of floating inputs. None where they come from the judge's seeds."""
    kept: tuple[int, int] | None
    """The range of the elements of floating inputs that are not 0, counted through all of them; None for all."""
    seeds: tuple[int, ...]
    """Seeds of the input sets. Empty for the judge's own, which are secret."""
    facts: Facts
    """Facts of the verdict on the smallest failing problem, with the first wrong values."""
    evaluations: int
    """Number of evaluations that were made."""
    seconds: float
    """How long it took, in seconds."""
    problem: str | None
    """Source of the smallest failing problem. None where none failed."""
    repro: str | None
    """Source of a program that shows the failure. None where none failed."""

    @property
    def elements_before(self) -> int | None:
        """Number of elements of the problem's inputs. None where that is unknown."""
        return _elements(self.before)

    @property
    def elements_after(self) -> int | None:
        """The same of the smallest failing problem."""
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
        """Yield the report in words. They hold words of the kernel's: show them cleaned."""
        if self.refusal is not None:
            yield f"no autopsy: {self.refusal}"
            return
        if self.after is None:
            why = (
                "judged again with the same settings, the kernel did not fail so. It may depend on chance, on time, or"
                " on what else ran"
                if self.ended is Ended.NOT_AGAIN
                else "it ended before the kernel was judged again"
            )
            yield f"{self.category}: no autopsy: {why} ({self.evaluations} evaluations)"
            return
        assert self.before is not None
        yield f"{self.category}: {self.message}"
        yield f"inputs: {words_of(self.before)} -> {words_of(self.after)}"
        yield f"elements: {self.elements_before} -> {self.elements_after}"
        for change in self.changes:
            yield f"  line {change.line} ({change.name}): {change.before} -> {change.after}"
        if not self.seeds:
            yield "values: drawn by the judge's secret seeds; no fixed inputs were found on which it fails"
        else:
            sets = f"{len(self.seeds)} input sets, one after the other" if len(self.seeds) > 1 else "one input set"
            only = "" if self.kept is None else f"; elements {self.kept[0]} to {self.kept[1] - 1} alone, all others 0"
            yield f"values: {self.fill}{only}; {sets}"
        if self.facts.first:
            yield f"output {self.facts.output}: {self.facts.wrong} of {self.facts.of} values are wrong. The first:"
            for place in self.facts.first:
                yield (
                    f"  index {list(place.index)}: expected {json_number(place.expected)}, got {json_number(place.got)}"
                )
        why = {
            Ended.SMALLEST: "nothing smaller was found to fail",
            Ended.EVALUATIONS: "the evaluations were used up; something smaller may fail",
            Ended.TIME: "the time was over; something smaller may fail",
            Ended.INTERRUPTED: "it was ended; something smaller may fail",
        }[self.ended]
        yield f"{self.evaluations} evaluations, {self.seconds:.1f} s: {why}"


def _elements(tensors: tuple[InputTensor, ...] | None) -> int | None:
    return None if tensors is None else sum(math.prod(tensor.shape) for tensor in tensors)


def words_of(tensors: tuple[InputTensor, ...]) -> str:
    """Return shapes and dtypes in one line."""
    return ", ".join(f"{list(tensor.shape)} {tensor.dtype}" for tensor in tensors) or "no tensors"
