"""The answers of the native API, as its OpenAPI describes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any, Self
from uuid import UUID

from pydantic import BaseModel, ConfigDict, FailFast, Field, computed_field

from kqueue import contract
from kqueue.categories import Blame, Category
from kqueue.config import MAX_BATCH
from kqueue.contract import Backend
from kqueue.http.failures import ProblemDetails
from kqueue.states import EvaluationState
from kqueue.store import reports
from kqueue.store.gpus import GpuStatus
from kqueue.store.probes import Record
from kqueue.store.workers import LiveWorker

_ID = "8e8ff5a3-0d57-44d6-b3a5-6d9d0f6a2b11"


class _Shape(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True, from_attributes=True)


class VerdictShape(contract.Verdict):
    """A verdict, with the facts that follow from it."""

    @classmethod
    def of(cls, verdict: contract.Verdict) -> Self:
        """A verdict's shape."""
        return cls.model_construct(**{name: getattr(verdict, name) for name in contract.Verdict.model_fields})

    @computed_field
    @property
    def blame(self) -> Blame:
        """The party to blame for the failure."""
        return super().blame

    @computed_field
    @property
    def compiled(self) -> bool | None:
        """KernelBench's `compiled`; null where it is unknown."""
        return super().compiled

    @computed_field
    @property
    def correctness(self) -> bool | None:
        """KernelBench's `correctness`; null where it is unknown."""
        return super().correctness

    @computed_field
    @property
    def runtime_ms(self) -> float | None:
        """Median time of a call in milliseconds; null unless passed and timed."""
        return super().runtime_ms

    @computed_field
    @property
    def baseline_ms(self) -> float | None:
        """Median time of the eager reference in milliseconds, where taken."""
        return super().baseline_ms

    @computed_field
    @property
    def speedup(self) -> float | None:
        """`baseline_ms / runtime_ms`; null unless both were timed by the same clock."""
        return super().speedup

    @computed_field
    @property
    def timing_basis(self) -> str | None:
        """The clock that took the time: `gpu_clock` or `cpu_clock`."""
        return super().timing_basis


class Body(contract.Bounded):
    """A request's body. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Entries(Body):
    """Evaluations to submit, all or none. The first wrong one is named."""

    entries: Annotated[list[contract.Request], FailFast()] = Field(min_length=1, max_length=MAX_BATCH)


class LooseEntries(Body):
    """Evaluations to submit, each for itself: the fields of a `Request` each, checked one by one."""

    entries: Annotated[list[dict[str, Any]], FailFast()] = Field(
        min_length=1,
        max_length=MAX_BATCH,
        examples=[[{"problem": "class Model: ...", "kernel": "class ModelNew: ...", "backend": "triton"}]],
    )


class Accepted(_Shape):
    """An evaluation that lies in the database and will end in one verdict."""

    evaluation_id: UUID = Field(examples=[_ID])
    created: bool
    """False where an earlier submission under the same idempotency key made it."""


class AcceptedBatch(_Shape):
    """Evaluations in the order of their entries."""

    evaluations: list[Accepted]


class EntryResult(_Shape):
    """The result of one entry: one of the two fields."""

    evaluation: Accepted | None = None
    error: ProblemDetails | None = None
    """The reason of a refusal. Nothing of the entry was written."""


class EntryResults(_Shape):
    """The result of each entry, in their order."""

    results: list[EntryResult]


class Evaluation(_Shape):
    """One evaluation in full but for its sources, which are artifacts."""

    evaluation_id: UUID = Field(examples=[_ID])
    state: EvaluationState
    lane: str = Field(examples=["gpu"])
    backend: Backend
    problem_label: str | None
    problem_hash: str
    kernel_label: str | None
    kernel_hash: str
    settings: Mapping[str, Any]
    batch: str | None
    submitted_at: datetime
    expires_at: datetime | None
    attempts: Sequence[reports.AttemptDetail]
    waiting: reports.Waiting | None
    """Why it waits, and for how long: while it is queued, or runs and another fleet has its device; else null."""
    verdict: VerdictShape | None
    """Null while there is none."""

    @classmethod
    def of(cls, detail: reports.Detail, waiting: reports.Waiting | None) -> Self:
        """An evaluation's shape."""
        known = {name: getattr(detail, name) for name in cls.model_fields if name != "waiting"}
        known["waiting"] = waiting
        known["verdict"] = detail.verdict and VerdictShape.of(detail.verdict)
        return cls.model_construct(**known)


class Page(_Shape):
    """Evaluations, the latest submitted first."""

    evaluations: list[reports.Listed]
    cursor: str | None
    """Ask with it for those that follow; null where there are none."""


class Awaited(_Shape):
    """An evaluation's verdict, or null where it did not come in time."""

    evaluation_id: UUID = Field(examples=[_ID])
    verdict: VerdictShape | None


class WaitFor(Body):
    """The verdicts to wait for, and the longest wait."""

    evaluation_ids: list[UUID] = Field(min_length=1, max_length=1000, examples=[[_ID]])
    timeout: float = Field(default=30.0, ge=0, le=300, allow_inf_nan=False)
    """Seconds."""


class Verdicts(_Shape):
    """Verdicts that are there, a few at once; empty where none came in time."""

    verdicts: list[VerdictShape]
    unknown: list[UUID]
    """Those asked for that are no evaluations."""


class Cancelled(_Shape):
    """The end of an evaluation; `cancelled` is false if it had its verdict already."""

    evaluation_id: UUID = Field(examples=[_ID])
    cancelled: bool


class Batch(_Shape):
    """The progress of a batch."""

    batch: str = Field(examples=["tuesday"])
    total: int
    queued: int
    running: int
    done: int
    categories: dict[Category, int]
    """The number of evaluations in each category."""
    blames: dict[Blame, int]
    submitted_at: datetime
    """When its first evaluation was accepted."""
    finished_at: datetime | None
    """When the last one finished; null while one has not."""

    @classmethod
    def of(cls, batch: str, state: reports.BatchState) -> Self:
        """A batch's shape."""
        return cls(batch=batch, **asdict(state))


class Artifact(_Shape):
    """A file that belongs to an evaluation."""

    name: str = Field(examples=["kernel.py"])
    media_type: str = Field(examples=["text/plain"])
    bytes: int
    href: str = Field(examples=[f"/v1/evaluations/{_ID}/artifacts/kernel.py"])


class Artifacts(_Shape):
    """The files of an evaluation: before its verdict the two sources only."""

    artifacts: list[Artifact]


class CategoryShape(_Shape):
    """A row of the table of categories."""

    category: Category
    blame: Blame
    compiled: bool | None
    correctness: bool | None
    retried: bool
    """True if the fleet makes another attempt, until those of the evaluation are used up."""
    meaning: str


class Categories(_Shape):
    """All categories."""

    categories: list[CategoryShape]


class Leaderboard(_Shape):
    """The fastest passed kernel of each problem, precision and device model, the largest speedup first."""

    best: list[reports.Best]


class Problems(_Shape):
    """Stored problems, the latest first."""

    problems: list[reports.StoredProblem]
    cursor: str | None
    """Ask with it for those that follow; null where there are none."""


class Problem(_Shape):
    """A stored problem with its source."""

    problem_hash: str = Field(examples=["9f" * 32])
    problem_label: str | None
    bytes: int
    created_at: datetime
    source: str


class Lane(_Shape):
    """The evaluations on a lane, and its workers."""

    queued: int
    running: int
    workers: int
    """Those that live."""


class Fleet(_Shape):
    """The fleet at this moment, a second old at most as a rule; and what probes of its judge showed in the last day."""

    lanes: dict[str, Lane]
    workers: Sequence[LiveWorker]
    gpus: list[GpuStatus]
    probes: Record
