"""The one declaration of each field of an evaluation in reports, from which their rows are made.

A report names its fields with :func:`view`, in the order in which JSON, CSV and Parquet have them. Type, meaning and
SQL come from here. A field's name declares its caption and its unit (:func:`kqueue.figures.caption`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import make_dataclass
from datetime import datetime
from typing import Annotated, Any, Final, TypeVar, get_type_hints
from uuid import UUID

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from sqlalchemy import ColumnElement, Double, cast, func

from kqueue.categories import Blame, Category
from kqueue.evidence import Measurement
from kqueue.states import EvaluationState, Priority, Writer
from kqueue.store.models import Evaluation, Kernel, Problem, Verdict
from kqueue.store.sql import columns

_T = TypeVar("_T")


@dataclass(frozen=True, config=ConfigDict(use_attribute_docstrings=True))
class Row:
    """The fields of evaluations in reports. Times of day are in UTC."""

    evaluation_id: UUID
    """Id of the evaluation."""
    owner: str
    """Owner of the evaluation."""
    producer: str
    """Its producer: a token's name, or a declared name."""
    batch: str | None
    """Name of its batch."""
    problem_label: str | None
    """Name of the problem for people."""
    problem_hash: str
    """SHA-256 of the problem's source."""
    problem: str
    """Source of the reference."""
    kernel_label: str | None
    """Name of the kernel for people."""
    kernel_hash: str
    """SHA-256 of the kernel's backend and source."""
    backend: str
    """The kernel's language or library."""
    kernel: str
    """Source of the kernel."""
    run: str | None
    """Name of the search that proposed the kernel. Null, like the next four, for a kernel of no search."""
    parent_id: UUID | None
    """Evaluation of the kernel from which the search made this one."""
    parent: str | None
    """Source of that kernel."""
    prompt: str | None
    """The search's prompt."""
    answer: str | None
    """The model's answer to it."""
    lane: str
    priority: Priority
    settings: Any
    """Settings of the evaluation, as JSON."""
    state: EvaluationState
    attempts: Any
    """Number of attempts. More than one only if the fleet failed."""
    submitted_at: datetime
    """Time of its submission."""
    finished_at: datetime | None
    """Time of its verdict."""
    category: Category | None
    """The outcome."""
    blame: Blame | None
    """The responsible party."""
    compiled: bool | None
    """True if the kernel was compiled. Null if unknown."""
    correctness: bool | None
    """True if the kernel was correct. Null if unknown."""
    phase: str | None
    """Phase in which the evaluation ended. Null for a passed kernel."""
    message: str | None
    """The failure in one line."""
    facts: str
    """The facts from which the category was decided, as JSON."""
    feedback: str
    """The verdict in words, for a language model."""
    evidence: str
    """All other observations, as JSON."""
    written_by: Writer
    """The process that recorded the verdict."""
    reused: bool
    """True if the verdict was reused from an equal evaluation."""
    reused_from: UUID | None
    """The evaluation whose verdict was reused. Null for one that was judged itself."""
    runtime: Measurement | None
    """Time of the kernel: statistics and histogram of the timed calls. Null unless it passed and was timed."""
    baseline: Measurement | None
    """Time of the reference, in the same form."""
    runtime_ms: float | None
    """Median time of the kernel."""
    q1_ms: float | None
    """First quartile of its calls."""
    q3_ms: float | None
    """Third quartile of its calls."""
    baseline_ms: float | None
    """Median time of the eager reference."""
    compiled_ms: float | None
    """Median time of the reference under ``torch.compile``. Null if not requested or failed."""
    speedup: float | None
    """Time of the reference divided by the kernel's."""
    speedup_low: float | None
    """Lower end of the speedup's 95 % interval."""
    speedup_high: float | None
    """Upper end of that interval."""
    device: str | None
    """Name of the device that judged it."""
    environment: str | None
    """The device and software, as JSON."""
    slot_s: float
    """Seconds for which its attempts occupied a slot."""
    device_s: float
    """Seconds for which the last attempt had exclusive use of a device."""
    cpu_s: float
    """CPU seconds of the last attempt."""
    waited_s: float
    """Seconds from submission to the first attempt, or to the verdict if there was none."""


#: Meanings of the fields.
MEANINGS: Final[dict[str, str]] = {name: field.description for name, field in vars(Row)["__pydantic_fields__"].items()}


def number(measurement: Any, name: str) -> ColumnElement[Any]:
    """Return a number of a measurement."""
    return cast(measurement[name].astext, Double)


def _error(measurement: Any) -> ColumnElement[Any]:
    """Return the error of a measurement as a share of its median, as :attr:`kqueue.evidence.Measurement.error` does."""
    width = number(measurement, "high_ms") - number(measurement, "low_ms")
    return width / 2 / func.nullif(number(measurement, "median_ms"), 0)


_FACTOR: Final = 1 + func.sqrt(func.power(_error(Verdict.runtime), 2) + func.power(_error(Verdict.baseline), 2))
#: SQL of the fields that are no columns of this name.
EXPRESSIONS: Final[dict[str, Any]] = {
    "evaluation_id": Evaluation.id,
    "problem": Problem.source,
    "kernel": Kernel.source,
    "reused": Verdict.reused_from.is_not(None),
    "q1_ms": number(Verdict.runtime, "q1_ms"),
    "q3_ms": number(Verdict.runtime, "q3_ms"),
    "compiled_ms": number(Verdict.evidence["compiled_baseline"], "median_ms"),
    "speedup_low": Verdict.speedup / _FACTOR,
    "speedup_high": Verdict.speedup * _FACTOR,
}


def view(fields: str) -> Callable[[type[_T]], type[_T]]:
    """Turn a class into a frozen dataclass. It has these fields of a row in this order, behind the fields of its base.

    A type in the class replaces the row's. Other fields of the row do not exist, which no checker of types knows.
    """

    def made(kind: type[_T]) -> type[_T]:
        hints = get_type_hints(Row) | get_type_hints(kind)
        typed = [(name, Annotated[hints[name], Field(description=MEANINGS.get(name))]) for name in fields.split()]
        members = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
        bases = tuple(base for base in kind.__bases__ if base is not Row)
        return make_dataclass(kind.__name__, typed, bases=bases, namespace=members, frozen=True, slots=True)

    return made


def select_of(kind: type[Any], *sources: Any, **named: Any) -> list[Any]:
    """Return the columns of a view, as :func:`~kqueue.store.sql.columns` does."""
    known = {name: expression for name, expression in EXPRESSIONS.items() if name in kind.__dataclass_fields__}
    return columns(kind, *sources, **known | named)
