"""The corpus of cheats: one small program for each known way to look faster or more right than one is.

Each program is a file under ``programs/`` with its unique code, which ``compose.py`` completes to a program that a
model would write. Its docstring describes the cheat, why it would work with an evaluator that compares and times inside
the kernel's process, and the defense here. *Controls* are honest kernels that look suspicious and must pass with an
unchanged time.

One line a program, in ``table_a.py`` (timing and controls) and ``table_b.py`` (values and processes)::

    for program in programs("cpu"):
        verdict = client.submit(program.request("cpu")).wait()
        assert judge(program, Facts.of(verdict), "cpu").good
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from kqueue.categories import Blame, Category
from kqueue.contract import Deadlines, Outcome, Policies, Policy, Request, Settings, Timing, Verdict
from tests.integrity.compose import compose, programs_of

HERE: Final = Path(__file__).resolve().parent
#: The text of each program, by its folder and name.
KERNELS: Final = {
    f"{file.parent.name}/{name}": text
    for file in sorted((HERE / "programs").rglob("*.py"))
    for name, text in programs_of(file).items()
}
#: The text of each of the corpus's problems, and of all problems that programs can use.
OWN_PROBLEMS: Final = {
    name: text for file in (HERE / "problems").glob("*.py") for name, text in programs_of(file).items()
}
PROBLEMS: Final = {
    file.stem: file.read_text(encoding="utf-8") for file in (HERE.parents[1] / "examples" / "problems").glob("*.py")
} | OWN_PROBLEMS
TABLES: Final = ("table_a", "table_b")
BOTH: Final = frozenset({"cpu", "gpu"})
CPU: Final = frozenset({"cpu"})
GPU: Final = frozenset({"gpu"})
CONTROL: Final = "control"

#: Tolerance in milliseconds of clocks on a busy host.
_SLACK_MS: Final = 0.002
#: Ratio to the honest program's baseline from which a baseline counts as slowed by the candidate.
_SABOTAGED: Final = 2.0


@dataclass(frozen=True, slots=True)
class Program:
    """One cheat, or one control, and its expected outcome.

    Attributes:
        name: unique and path-like: ``timing/event_monkeypatch``.
        family: a way of cheating, such as ``side streams unjoined``, or :data:`CONTROL`.
        problem: the name of the reference's text, in :data:`PROBLEMS`.
        file: the name of the kernel's text, in :data:`KERNELS`. Several programs can share one.
        backend: the kernel's language.
        lanes: ``cpu``, ``gpu`` or both.
        expected: the categories that are right.
        honest: the program whose time a passing cheat must not undercut and a control must keep, and whose
            baseline, if it is by the same clock, must be equal. It is for the same problem, or for one that
            computes the same. Times are compared on a GPU only.
        tolerance: deviation from the honest time as a share of it.
        least_ms: the minimum honest time of a passing program in milliseconds, on any lane.
        basis: the clock that must have timed a program that passed on a GPU, or None for either.
        precision_downgrade: the label that the comparison must give it, or None for either.
        constants: values for top-level constants of the problem and of the kernel, such as sizes, so that several
            programs share a file.
        cpu_constants: constants with different values on the ``cpu`` lane.
        settings: settings of the request. The ``cpu`` lane makes fewer checks and calls.
        hole: the reason that it is known to be undetected. Empty for all but a few programs.
        note: further text for a reader of the report.
    """

    name: str
    family: str
    problem: str
    file: str
    backend: str
    lanes: frozenset[str]
    expected: frozenset[Category]
    honest: str | None = None
    tolerance: float = 0.1
    least_ms: float | None = None
    basis: str | None = None
    precision_downgrade: bool | None = None
    constants: Mapping[str, object] = field(default_factory=dict)
    cpu_constants: Mapping[str, object] = field(default_factory=dict)
    settings: Settings = field(default_factory=Settings)
    hole: str = ""
    note: str = ""

    @property
    def is_control(self) -> bool:
        """Return whether it is honest."""
        return self.family == CONTROL

    @property
    def mechanism(self) -> str:
        """Return its docstring: the cheat, why it would work elsewhere, and the defense here."""
        return ast.get_docstring(ast.parse(KERNELS[self.file])) or ""

    def sources(self, kind: str) -> tuple[str, str]:
        """Return the problem and the kernel with this program's constants, for ``cpu`` or ``gpu``."""
        texts = [compose(PROBLEMS[self.problem], "problem"), compose(KERNELS[self.file], "kernel")]
        constants = {**self.constants, **(self.cpu_constants if kind == "cpu" else {})}
        for name, value in constants.items():
            changed = [re.sub(rf"(?m)^{name} = .*$", f"{name} = {value!r}", text) for text in texts]
            if not any(re.search(rf"(?m)^{name} = ", text) for text in texts):
                raise ValueError(f"{self.name}: neither its problem nor its kernel has a constant {name}")
            texts = changed
        return texts[0], texts[1]

    def request(self, lane: str) -> Request:
        """Return the request. On the ``cpu`` lane it makes at most 2 checks and 16 timed calls."""
        kind = lane.partition(".")[0]
        if kind not in self.lanes:
            raise ValueError(f"{self.name} is for {' and '.join(sorted(self.lanes))}, not for the lane {lane!r}")
        settings = self.settings
        if kind == "cpu":
            timing = settings.timing.model_copy(
                update={"calls": min(16, settings.timing.calls), "warmup": min(1, settings.timing.warmup)}
            )
            settings = settings.model_copy(update={"checks": min(2, settings.checks), "timing": timing})
        else:
            # A cheat that hangs when it is timed holds the device for this time.
            deadlines = settings.deadlines.model_copy(update={"time_s": min(10.0, settings.deadlines.time_s)})
            settings = settings.model_copy(update={"deadlines": deadlines})
        problem, kernel = self.sources(kind)
        return Request(
            problem=problem,
            kernel=kernel,
            backend=self.backend,
            lane=lane,
            settings=settings,
            problem_label=self.problem,
            kernel_label=self.name,
            batch="integrity",
            reuse=False,
        )


def program(
    name: str,
    family: str,
    expected: Category | Iterable[Category],
    *,
    problem: str = "gelu",
    backend: str = "torch",
    lanes: frozenset[str] = BOTH,
    file: str | None = None,
    **more: Any,
) -> Program:
    """Return a line of a table. ``more`` has further fields of :class:`Program` and of :class:`Settings`."""
    settings: dict[str, Any] = {
        "checks": 3,
        "timing": Timing(calls=60, warmup=3),
        "deadlines": Deadlines(load_s=90, construct_s=30, check_s=30, time_s=30),
    }
    settings |= {key: more.pop(key) for key in more.keys() - Program.__dataclass_fields__.keys()}
    return Program(
        name=name,
        family=family,
        problem=problem,
        file=file or name,
        backend=backend,
        lanes=lanes,
        expected=frozenset({expected} if isinstance(expected, Category) else expected),
        settings=Settings(**settings),
        **more,
    )


def control(name: str, *, backend: str = "torch", tolerance: float = 0.5, **more: Any) -> Program:
    """Return a line with an honest kernel, which must pass even under policies that reject any finding."""
    decoys = Policy.FLAG if backend == "torch" else Policy.REJECT  # torch's kernels come from outside the candidate
    more.setdefault("policies", Policies(findings=Policy.REJECT, decoys=decoys))
    return program(name, CONTROL, Category.PASSED, backend=backend, tolerance=tolerance, **more)


def programs(lane: str | None = None) -> list[Program]:
    """Return the corpus, or its programs for ``lane``."""
    kind = lane and lane.partition(".")[0]
    tables = [importlib.import_module(f"tests.integrity.{table}").TABLE for table in TABLES]
    return [entry for table in tables for entry in table if kind is None or kind in entry.lanes]


class Judgement(StrEnum):
    """Relation of a program's outcome to the expected one."""

    OK = "ok"
    HOLE = "known hole"
    CHEAT_PASSED = "cheat passed"
    DISHONEST_TIME = "dishonest time"
    WRONG_CATEGORY = "wrong category"
    WRONG_BASIS = "wrong basis"
    WRONG_LABEL = "wrong label"
    FALSE_ACCUSATION = "false accusation"
    CHANGED_TIME = "changed time"
    FLEET_FAILED = "fleet failed"

    @property
    def good(self) -> bool:
        """Return whether the outcome is as expected."""
        return self in (Judgement.OK, Judgement.HOLE)


@dataclass(frozen=True, slots=True)
class Facts:
    """The compared part of an outcome: category, times of kernel and reference, clock, and label."""

    category: Category
    median_ms: float | None = None
    basis: str | None = None
    baseline_ms: float | None = None
    precision_downgrade: bool | None = None

    @classmethod
    def of(cls, outcome: Outcome | Verdict) -> Facts:
        """Return the facts of an outcome or verdict."""
        errors = outcome.evidence.comparison
        label = errors.precision_downgrade if errors else None
        return cls(outcome.category, outcome.runtime_ms, outcome.timing_basis, outcome.baseline_ms, label)


def judge(program: Program, facts: Facts, lane: str, honest: Facts | None = None) -> Judgement:
    """Compare an outcome with the expected one, and with the honest program's if both had a quiet device."""
    passed = facts.category is Category.PASSED
    verdict = Judgement.OK
    if facts.category.blame in (Blame.FLEET, Blame.NOBODY, Blame.PROBLEM):
        verdict = Judgement.FLEET_FAILED
    elif facts.category not in program.expected:
        if program.is_control:
            verdict = Judgement.FALSE_ACCUSATION
        else:
            verdict = Judgement.CHEAT_PASSED if passed else Judgement.WRONG_CATEGORY
    elif program.precision_downgrade not in (None, facts.precision_downgrade):
        verdict = Judgement.WRONG_LABEL
    elif passed:
        verdict = _judge_time(program, facts, lane, honest)
    if program.hole and verdict in (Judgement.CHEAT_PASSED, Judgement.DISHONEST_TIME):
        return Judgement.HOLE
    return verdict


def _judge_time(program: Program, facts: Facts, lane: str, honest: Facts | None) -> Judgement:
    if program.basis is not None and lane != "cpu" and facts.basis != program.basis:
        return Judgement.WRONG_BASIS
    took = facts.median_ms
    if program.least_ms is not None and (took is None or took < program.least_ms):
        return Judgement.DISHONEST_TIME
    if took is None or honest is None or honest.median_ms is None:
        return Judgement.OK
    if took < honest.median_ms / (1 + program.tolerance) - _SLACK_MS:
        return Judgement.CHANGED_TIME if program.is_control else Judgement.DISHONEST_TIME
    if program.is_control and took > honest.median_ms * (1 + program.tolerance) + _SLACK_MS:
        return Judgement.CHANGED_TIME
    both = facts.baseline_ms and honest.baseline_ms and facts.basis == honest.basis
    if both and facts.baseline_ms > _SABOTAGED * honest.baseline_ms:
        return Judgement.DISHONEST_TIME
    return Judgement.OK
