"""Schemas of the native API's bodies and answers, for its OpenAPI document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from uuid import UUID

from pydantic import BaseModel, ConfigDict, FailFast, Field

from kqueue import contract
from kqueue.categories import Blame, Category
from kqueue.client.transport import Accepted
from kqueue.config import MAX_BATCH
from kqueue.http.devices import View
from kqueue.http.failures import ProblemDetails
from kqueue.states import EvaluationState
from kqueue.store.gpus import GpuStatus
from kqueue.store.reports.overview import Records
from kqueue.store.workers import LiveWorker

_ID = "8e8ff5a3-0d57-44d6-b3a5-6d9d0f6a2b11"


#: Parameter with any text.
Text = Annotated[str | None, Field(min_length=1, max_length=200, pattern=r"^[^\x00]+$")]


class Shape(BaseModel):
    """The base of answers."""

    model_config = ConfigDict(use_attribute_docstrings=True, from_attributes=True)


class Body(contract.Bounded):
    """The body of a request. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Entries(Body):
    """Evaluations to submit, all or none. An error names the first wrong entry."""

    entries: Annotated[list[contract.Request], FailFast()] = Field(min_length=1, max_length=MAX_BATCH)


class LooseEntries(Body):
    """Evaluations to submit independently. Each entry has the fields of a `Request` and is checked separately."""

    entries: Annotated[list[dict[str, Any]], FailFast()] = Field(
        min_length=1,
        max_length=MAX_BATCH,
        examples=[[{"problem": "class Model: ...", "kernel": "class ModelNew: ...", "backend": "triton"}]],
    )


class AcceptedBatch(Shape):
    """Evaluations in the order of their entries."""

    evaluations: list[Accepted]


class EntryResult(Shape):
    """The result of one entry. Exactly one of the two fields is set."""

    evaluation: Accepted | None = None
    error: ProblemDetails | None = None
    """The reason for a refusal. Nothing of the entry was stored."""


class EntryResults(Shape):
    """The result of each entry, in the order of the entries."""

    results: list[EntryResult]


class Awaited(Shape):
    """An evaluation's verdict, or null if it did not come in time."""

    evaluation_id: UUID = Field(examples=[_ID])
    verdict: contract.Verdict | None


class WaitFor(Body):
    """The evaluations to wait for, and the timeout."""

    evaluation_ids: list[UUID] = Field(min_length=1, max_length=1000, examples=[[_ID]])
    timeout: float = Field(default=30.0, ge=0, le=300, allow_inf_nan=False)
    """Maximum seconds of the wait."""


class Verdicts(Shape):
    """Some of the verdicts that exist, or none if none came in time."""

    verdicts: list[contract.Verdict]
    unknown: list[UUID]
    """Requested ids without an evaluation."""


class Cancelled(Shape):
    """The result of a cancellation. `cancelled` is false if the evaluation already had its verdict."""

    evaluation_id: UUID = Field(examples=[_ID])
    cancelled: bool


class Artifact(Shape):
    """A file of an evaluation."""

    name: str = Field(examples=["kernel.py"])
    media_type: str = Field(examples=["text/plain"])
    bytes: int
    href: str = Field(examples=[f"/v1/evaluations/{_ID}/artifacts/kernel.py"])


class Artifacts(Shape):
    """The files of an evaluation. Before its verdict these are the two sources."""

    artifacts: list[Artifact]


class CategoryShape(Shape):
    """A row of the table of categories."""

    category: Category
    blame: Blame
    compiled: bool | None
    correctness: bool | None
    retried: bool
    """True if the fleet makes another attempt while the evaluation has attempts left."""
    meaning: str


class Categories(Shape):
    """All categories."""

    categories: list[CategoryShape]


class PublicKey(Shape):
    """An Ed25519 key that signed receipts, in hexadecimal."""

    key_id: str
    public_key: str


class Lane(Shape):
    """The numbers of evaluations and workers of a lane."""

    queued: int
    running: int
    workers: int
    """Number of live workers."""


def lanes_of(view: View) -> dict[str, Lane]:
    """Return the lanes that have workers or evaluations, by name."""
    none = dict.fromkeys((EvaluationState.QUEUED, EvaluationState.RUNNING), 0)
    return {
        name: Lane(**view.backlog.get(name, none), workers=view.lanes.get(name, 0))
        for name in sorted({*view.backlog, *view.lanes})
    }


@dataclass(frozen=True, slots=True)
class Fleet(Records):
    """The state of the fleet, about one second old, and the results of the last day's probes."""

    lanes: dict[str, Lane]
    workers: Sequence[LiveWorker]
    gpus: list[GpuStatus]
