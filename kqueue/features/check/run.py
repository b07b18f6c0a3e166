"""One check: each shape of each operator is judged at head, and then base and head fight a duel.

A change of speed counts if two duels agree, because a check has many. The second one gives the ratio and its interval,
which its selection by the first does not bias. A fault of base is reported, and never makes head fail.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Final

from kqueue.backends import registered
from kqueue.categories import Blame, Category
from kqueue.contract import Request, Result, Sanitizer, Verdict, parse_request
from kqueue.errors import InvalidRequest, JudgeUnavailable
from kqueue.evidence import SIZES_RULE, Environment
from kqueue.features.check import imports
from kqueue.features.check.operators import (
    BASE,
    Case,
    Operator,
    Operators,
    file_of,
    kernel_of,
    listed,
    problem_of,
    read,
)
from kqueue.features.duel.duels import Duel
from kqueue.files import read_text
from kqueue.judging import guess_backend
from kqueue.text import one_line
from kqueue.trees import Clone, Tree, pack

#: Maximum size in bytes of a reference's file, and of the modules from which a backend is guessed.
_MOST_BYTES: Final = 1 << 20
_MOST_WORDS: Final = 300
#: Part by which head can still be slower after a duel without a decision, above which its speed is unknown.
_NOISY: Final = 0.05


class State(StrEnum):
    """The result of a row."""

    RIGHT = "right"
    """Right, and not slower than allowed."""
    WRONG = "wrong"
    SLOWER = "slower"
    """Slower than allowed."""
    UNJUDGED = "could not be judged"
    SKIPPED = "skipped"
    """Not judged on purpose: removed, or untouched by the change."""


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one shape of an operator in one dtype on one lane.

    Attributes:
        shape: sizes and ranges, so that a row has the same name in each check.
        lane: the lane, if a check has several.
        notes: ends of its words: the drawn sizes, and how the change touches the operator.
        speed: head's speed divided by base's, None if they were not compared. ``interval`` is its interval.
        evaluation_id, duel: ids on a fleet of the evaluation of head, and of the last duel.
    """

    operator: str
    state: State
    words: str
    shape: str = ""
    dtype: str = ""
    lane: str = ""
    notes: tuple[str, ...] = ()
    speed: float | None = None
    interval: tuple[float, float] | None = None
    evaluation_id: str | None = None
    duel: str | None = None
    environment: Environment | None = None

    @property
    def name(self) -> str:
        """The operator with its shape, dtype and lane."""
        given = ", ".join(filter(None, (self.shape, self.dtype, self.lane)))
        return f"{self.operator}[{given}]" if given else self.operator

    def ending(self, state: State, *words: str) -> Row:
        """Return the row with its result, in words of which some can be empty."""
        return replace(self, state=state, words="; ".join(filter(None, (*words, *self.notes))))

    def record(self) -> dict[str, Any]:
        """Return the row in JSON."""
        shown = {name: value for name, value in asdict(self).items() if name != "notes"}
        return shown | {"environment": self.environment and self.environment.model_dump(mode="json")}


@dataclass(frozen=True, slots=True)
class Side:
    """One revision, when it was committed, the folder with its files, their tree, and its operators."""

    revision: str
    committed: str
    folder: Path
    tree: Tree
    operators: Operators

    @property
    def line(self) -> str:
        """The first lines of a source that imports from it."""
        return self.tree.line(self.operators.root, self.operators.build)

    def file_of(self, entry: str) -> str | None:
        """Return the path of the file of an entry's module, or None."""
        return file_of(entry.partition(":")[0], self.tree.files, self.operators.root)

    def lacks(self, operator: Operator) -> str:
        """Return what an operator misses in this revision, or nothing."""
        module, _, name = operator.entry.partition(":")
        if (path := self.file_of(operator.entry)) is None:
            return f"there is no module {module}{self.operators.root and f' below {self.operators.root}'}"
        return "" if imports.defines(self.folder / path, name) else f"{path} defines no {name}"

    def closure(self, operator: Operator) -> dict[str, str]:
        """Return the files on which an operator depends, each with the one that imports it."""
        return imports.closure(self.folder, self.tree.files, self.operators.root, operator.entry)

    def backend(self, operator: Operator) -> str:
        """Return the backend of an operator: its own, or the one that the nearest of its modules shows."""
        if operator.backend is not None:
            return operator.backend
        for path in imports.nearest(self.folder, self.tree.files, self.operators.root, operator.entry):
            text = ""
            with suppress(InvalidRequest):  # a file that cannot be read shows no backend
                text = read_text(self.folder / path, _MOST_BYTES) if path.endswith(".py") else ""
            try:
                if (backend := guess_backend(text)) != "torch":
                    return backend
            except InvalidRequest as error:
                raise InvalidRequest(f"{operator.name}: {path}: {error}") from None
        return "torch"


@dataclass(frozen=True)
class Check:
    """The settings of a check.

    Attributes:
        judge: function that judges a request.
        fight: function that fights a duel of base and head to its end.
        settings: further settings of the evaluations, in JSON.
        batch: batch of the evaluations.
        lanes: the lanes on which each row is judged, or an empty name on this machine.
        timed: whether speeds are compared.
        qualify: whether the sanitizers look at head.
        environment: the environment of a judge on this machine.
    """

    base: Side
    head: Side
    judge: Callable[[Request], Result]
    fight: Callable[[Request, Request], Duel]
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    batch: str | None = None
    lanes: tuple[str, ...] = ("",)
    timed: bool = True
    qualify: bool = False
    environment: Environment | None = None

    def tasks(self, changed: frozenset[str] | None) -> Iterator[Callable[[], Row]]:
        """Yield a function for each row. ``changed`` are the paths that the change touches, or None to judge all."""
        theirs = self.base.operators.by_name
        for name in sorted(theirs.keys() - self.head.operators.by_name.keys()):
            yield partial(Row, name, State.SKIPPED, "removed: only base lists it")
        for operator in self.head.operators.by_name.values():
            before = theirs.get(operator.name, operator)
            why = "its definition changed" if operator != before else ""
            if changed is not None and operator == theirs.get(operator.name):
                files = self.base.closure(before) | self.head.closure(operator)
                why = imports.touched(changed, files, built=bool(self.head.operators.build))
                if not why:
                    yield partial(Row, operator.name, State.SKIPPED, "the change touches none of its files")
                    continue
            for case in operator.cases():
                for lane in self.lanes:
                    yield partial(self._row, case, lane, before, why)

    def _row(self, case: Case, lane: str, theirs: Operator, why: str) -> Row:
        """Judge one shape. ``why`` says how the change touches the operator, or nothing."""
        operator, named = case.operator, lane if len(self.lanes) > 1 else ""
        notes = (case.drawn and f"at {case.drawn}", why)
        row = Row(operator.name, State.RIGHT, "", case.shape, str(case.dtype), named, notes)
        missing, before = self.head.lacks(operator), self.base.lacks(theirs)
        if missing and before and self.head.operators.build:
            missing = before = ""  # builds make it
        if missing and before:
            return row.ending(State.UNJUDGED, f"{missing}, neither in head nor in base")
        if missing:
            return row.ending(State.WRONG, f"{missing} in head, and base has it")
        try:
            return self._judged(case, row, lane, theirs, before)
        except JudgeUnavailable as error:
            return row.ending(State.UNJUDGED, one_line(error))

    def _judged(self, case: Case, row: Row, lane: str, theirs: Operator, before: str) -> Row:
        operator = case.operator
        if before and operator.reference == BASE:
            return row.ending(State.UNJUDGED, f"{before} in base, which is its reference: give another")
        head = self._request(case, lane, self.head, operator, shapes="flag", qualify=self.qualify)
        result = self.judge(head)
        row = replace(row, environment=self.environment)
        if isinstance(result, Verdict):
            notes = ("judged before" if result.reused_from else "", *row.notes)
            row = replace(row, evaluation_id=str(result.evaluation_id), environment=result.environment, notes=notes)
        if not result.judged:
            is_call = result.blame is Blame.PROBLEM and "TypeError" in result.message and ":" in operator.reference
            return row.ending(State.UNJUDGED, _words(result), "see its `reference_call`" if is_call else "")
        if self.qualify and (fault := _examined(result)) is not None:
            return row.ending(*fault)
        specialised = _specialised(result)
        if before:
            if not result.passed:
                return row.ending(State.WRONG, _words(result))
            return row.ending(State.RIGHT, "right", f"new: {before} in base", specialised and _OWN_SIZES)
        base = self._request(case, lane, self.base, theirs, shapes="flag" if specialised else "allow")
        other = self.judge(base)
        if not result.passed:
            is_build = bool(self.head.operators.build) and result.category in _UNBUILT
            alike = (result.category, result.facts.exception) == (other.category, other.facts.exception)
            alike &= not is_build or result.message == other.message
            state = State.UNJUDGED if alike and (is_build or result.category in _HOST) else State.WRONG
            return row.ending(state, "base too" if alike else "", _words(result))
        if other.blame is Blame.CANDIDATE:
            what = _BASE_UNBUILT if other.category in _UNBUILT else _BASE_WRONG
            return row.ending(State.RIGHT, "right", f"{what}: {_words(other)}")
        if not other.passed:
            return row.ending(State.UNJUDGED, "right, but base could not be judged", _words(other))
        if specialised and not _specialised(other):
            sizes, _, message = specialised.partition(": ")
            also = f"right at {listed(case.sizes)}, and base is right at other sizes too"
            return row.ending(State.WRONG, f"wrong at {sizes} ({also}): {message}")
        row = replace(row, notes=(specialised and f"{_OWN_SIZES}, like base", *row.notes))
        if not self.timed:
            return row.ending(State.RIGHT, "right")
        is_triton = any(registered()[one.backend].triton for one in (base, head))
        on_cpu = row.environment is not None and row.environment.cuda is None
        if is_triton and on_cpu and not head.settings.timing.interpreter:
            return row.ending(State.RIGHT, "right", _INTERPRETED)
        return self._compared(base, head, operator.slower, row)

    def _compared(self, base: Request, head: Request, slower: float, row: Row) -> Row:
        winners: list[str | None] = []
        while True:
            duel = self.fight(self._timed(base), self._timed(head))
            row = replace(row, speed=duel.ratio, interval=duel.interval, duel=duel.id if self.batch else None)
            winners.append(duel.winner if duel.reason == "faster" else None)
            if len(winners) == 2 or winners == [None]:
                break
        match duel.reason:
            case "faster" if len(set(winners)) == 1 and duel.ratio and duel.interval:
                part = f"{100 * abs(duel.ratio - 1):.2g} % {'faster' if duel.winner == 'b' else 'slower'} than base"
                if duel.winner == "a" and duel.interval[1] < 1 - slower:
                    return row.ending(State.SLOWER, part)
                allowed = f"not surely by more than the allowed {100 * slower:g} %" if duel.winner == "a" else ""
                return row.ending(State.RIGHT, "right", part, allowed)
            case "faster" | "rounds" if duel.interval and duel.interval[0] < 1 - max(slower, _NOISY):
                part = f"too noisy: head could be {100 * (1 - duel.interval[0]):.2g} % slower"
                part += " (a less busy machine or more --rounds can decide)"
                return row.ending(State.UNJUDGED, "right, but not its speed", part)
            case "faster" | "equal" | "rounds":
                return row.ending(State.RIGHT, "right", "no difference in speed found")
            case "failed" if duel.winner == "b":
                return row.ending(State.RIGHT, "right", f"{_BASE_WRONG}: {duel.a_failed}, when judged again")
            case "failed" | "both_failed":
                return row.ending(State.WRONG, f"{duel.b_failed}, when judged again")
            case _:
                return row.ending(State.UNJUDGED, "right, but not its speed", duel.message)

    def _request(
        self, case: Case, lane: str, side: Side, operator: Operator, *, shapes: str, qualify: bool = False
    ) -> Request:
        of = case.operator
        reference = _reference_of(of, self.base, self.head)
        trees = {side.tree.name: side.tree.text}
        line, text = "", ""
        if reference is not None:
            if of.reference_file:
                text = read_text(reference.folder / of.reference_file, _MOST_BYTES)
            line = reference.line
            trees[reference.tree.name] = reference.tree.text
        drawn = case.drawn and f" with {case.drawn[:40]}"
        settings: dict[str, Any] = {
            **self.settings,
            "precision": case.dtype,
            "policies": {"shapes": shapes, **self.settings.get("policies", {})},
            "timing": {**self.settings.get("timing", {}), "purpose": "check"},
        }
        if of.tolerance is not None:
            settings["tolerance"] = of.tolerance.model_dump()
        if of.gradients:
            settings["backward"] = True
        if qualify:
            settings["examine"] = {"sanitize": list(Sanitizer)}
        backend = side.backend(operator)
        if backend not in registered():
            raise InvalidRequest(f"{of.name}: backend: use one of {', '.join(registered())}")
        return parse_request(
            {
                "problem": problem_of(case, line, text),
                "kernel": kernel_of(operator, side.line),
                "trees": tuple(trees.values()),
                "backend": backend,
                "settings": settings,
                "problem_label": f"{of.name} {case.shape} {case.dtype}"[:200],
                "kernel_label": f"{operator.entry[:100]}{drawn} at {side.revision[:12]} of {side.committed}",
                "batch": self.batch,
                **({"lane": lane} if lane else {}),
            }
        )

    def _timed(self, request: Request) -> Request:
        """Return a request for the times of a kernel that was judged. A fleet has stored its trees."""
        given = request.settings.model_dump(mode="json", exclude_unset=True)
        timing = {**given["timing"], "purpose": self.settings.get("timing", {}).get("purpose", "rank")}
        settings = {**given, "timing": timing, "policies": {**given["policies"], "shapes": "allow"}, "examine": {}}
        trees = {} if self.batch is None else {"trees": ()}
        return parse_request(request.model_dump(exclude_unset=True) | {"settings": settings} | trees)


def sides(
    clone: Clone, revisions: tuple[str, str], folder: Path, config: str, names: Collection[str] | None
) -> tuple[Side, Side]:
    """Return both revisions, packed. If base lists no operators, head's count."""
    both: list[Side] = []
    for name, revision in zip(("head", "base"), reversed(revisions), strict=True):
        if both and revision == revisions[1]:
            both.append(both[0])
            break
        place = folder / name
        clone.unpack(revision, place)
        listed = place / config  # or the file itself, if its path is absolute
        is_listed = name == "head" or listed.is_file()
        operators = read(listed, f"{config} of {name}") if is_listed else replace(both[0].operators, by_name={})
        tree = pack(place, f"{name} ({revision[:12]})")
        both.append(Side(revision, clone.committed(revision), place, tree, operators))
    head, base = both
    known = head.operators.by_name
    for name in names or ():
        if name not in known:
            raise InvalidRequest(f"--operator {name}: {config} of head has {', '.join(known)}")
    return _some(base, names), _some(head, names)


def _some(side: Side, names: Collection[str] | None) -> Side:
    by_name = {name: one for name, one in side.operators.by_name.items() if not names or name in names}
    return replace(side, operators=replace(side.operators, by_name=by_name))


_INTERPRETED: Final = "not timed: Triton's interpreter runs on a CPU"
#: Categories that both sides share if the host lacks something, such as a GPU, a package, memory, or speed.
_HOST: Final = frozenset(
    {Category.IMPORT_ERROR, Category.TIMEOUT, Category.COMPILE_TIMEOUT, Category.GPU_OUT_OF_MEMORY,
     Category.HOST_OUT_OF_MEMORY}
)  # fmt: skip
_OWN_SIZES: Final = "right at its own sizes only"
_BASE_WRONG: Final = "base itself is wrong, so their speeds are not compared"
_BASE_UNBUILT: Final = "base does not build, so their speeds are not compared"
_UNBUILT: Final = frozenset({Category.COMPILE_ERROR, Category.COMPILE_TIMEOUT})


def _reference_of(operator: Operator, base: Side, head: Side) -> Side | None:
    """Return the side from which the reference comes, base if it has it, or None if no tree contains it."""
    if operator.reference == BASE:
        return base
    for side in (base, head):
        if operator.reference_file:
            if operator.reference_file in side.tree.files:
                return side
        elif side.file_of(operator.reference):
            return side
    if operator.reference_file:
        raise InvalidRequest(f"{operator.name}: reference: neither base nor head has {operator.reference_file}")
    return None


def _examined(result: Result) -> tuple[State, str] | None:
    """Return the end of a row whose kernel a sanitizer faults or could not examine, or None."""
    runs = result.evidence.sanitized or ()
    for run in runs:
        if run.findings:
            return State.WRONG, one_line(f"{run.tool} found {run.errors} errors: {run.findings[0]}")[:_MOST_WORDS]
    broken = "; ".join(f"{run.tool}: {run.error}" for run in runs if run.error) or ("" if runs else "no tool ran")
    if result.passed and broken:
        return State.UNJUDGED, one_line(f"right, but not examined: {broken}")[:_MOST_WORDS]
    return None


def _specialised(result: Result) -> str:
    """Return the sizes at which a kernel that is right at its own sizes fails, and its failure, or nothing."""
    found = [one.evidence for one in result.evidence.findings or () if one.rule == SIZES_RULE]
    return one_line(re.sub(r"([^,:]+): (\d+) instead of \d+", r"\1=\2", found[0]))[:_MOST_WORDS] if found else ""


def _words(result: Result) -> str:
    return one_line(f"{result.category}: {result.message}")[:_MOST_WORDS]
