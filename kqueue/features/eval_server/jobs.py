"""The asynchronous routes that some of KernelBench's clients use. A job is an evaluation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final, cast
from uuid import UUID

from fastapi import APIRouter, Body, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from kqueue.categories import Blame
from kqueue.errors import UnknownEvaluation
from kqueue.features.eval_server import dialects, server, tasks
from kqueue.features.eval_server.dialects import MODEL, MODEL_NEW, RESPONSES, TIMEOUT, IdempotencyKey, KernelRequest
from kqueue.features.eval_server.server import KernelExecResult
from kqueue.features.eval_server.tasks import TaskRequest, TaskResult
from kqueue.http import failures
from kqueue.http.auth import Caller, Reader, Submitter
from kqueue.http.devices import CurrentFleet, View
from kqueue.http.gateway import CurrentGateway, Gateway
from kqueue.states import EvaluationState
from kqueue.store import reports
from kqueue.store.reports import Progress

router: Final = APIRouter(tags=["jobs"])

#: Batch of all jobs, by which they are listed.
BATCH: Final = "jobs"
#: Maximum number of active jobs, and of completed jobs, in a list.
_SHOWN: Final = 100
_JOB: Final = f"{failures.FORM}job"
_TASK: Final = f"{failures.FORM}task"
#: Fields that distinguish a task of KernelGYM's form from a job.
_OF_A_TASK: Final = frozenset({"task_id", "reference_code", "kernel_code"})
_OF_A_JOB: Final = frozenset({"problem_id", "sample_id", "ref_arch_src", "custom_cuda"})
#: Name of a problem or a sample, usually a number.
_Name = int | Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,80}$")]


class EvaluationRequest(KernelRequest):
    """One kernel to judge. Unknown fields are ignored."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"problem_id": 19, "sample_id": 0, "level": 1, "custom_cuda": MODEL_NEW, "ref_arch_src": MODEL}
        }
    )

    problem_id: _Name
    sample_id: _Name
    kernel: str = Field(alias="custom_cuda", description="Source of the candidate: `ModelNew`, in any backend.")
    problem: str = Field(alias="ref_arch_src", description="Source of the reference.")
    level: _Name | None = None
    timeout_s: Annotated[float | None, TIMEOUT] = 300


class JobStatus(BaseModel):
    """A job's id and status."""

    job_id: UUID
    status: str = Field(examples=["queued"])


class Job(JobStatus):
    """A job and its result. Moments are in seconds since 1970."""

    result: KernelExecResult | None = Field(None, description="The result of a completed job.")
    error: str | None = Field(
        None, description="The reason why a failed job has no result. The kernel is not to blame."
    )
    device: str | None = Field(None, examples=["cuda:0"])
    queued_at: float
    started_at: float | None = None
    completed_at: float | None = None
    execution_time: float | None = Field(None, description="Seconds from start to completion.")


def _form(body: object) -> str:
    """Return the form of a request, by the fields that only KernelGYM's form has."""
    fields = set(cast("Mapping[str, Any]", body)) if isinstance(body, Mapping) else set[str]()
    return _TASK if fields & _OF_A_TASK and not fields & _OF_A_JOB else _JOB


_Submission = Annotated[
    Annotated[EvaluationRequest, Tag(_JOB)] | Annotated[TaskRequest, Tag(_TASK)], Discriminator(_form), Body()
]


@router.post("/evaluate", response_model=JobStatus | TaskResult, responses=RESPONSES)
async def submit(
    body: _Submission,
    request: Request,
    gateway: CurrentGateway,
    fleet: CurrentFleet,
    caller: Submitter,
    key: IdempotencyKey = None,
) -> JobStatus | TaskResult | JSONResponse:
    """Accept a job, whose id is the evaluation's, or judge a task of KernelGYM's form, which has `task_id`.

    The answer to a task is its result. If there is none after 80 % of its `timeout`, the answer is its status, and the
    client polls `/status/{task_id}` and `/results/{task_id}`.
    """
    if isinstance(body, TaskRequest):
        return await tasks.evaluate(body, request, gateway, await fleet.get(), caller, key)
    job_id = await _accept(gateway, caller, body, key)
    return JobStatus(job_id=job_id, status=_status(await gateway.read(reports.progress, job_id)))


@router.post("/evaluate_sync", response_model=Job, responses=RESPONSES)
async def evaluate_sync(
    body: EvaluationRequest,
    request: Request,
    gateway: CurrentGateway,
    fleet: CurrentFleet,
    caller: Submitter,
    key: IdempotencyKey = None,
) -> Job | JSONResponse:
    """Accept a job and wait for its result."""
    job_id = await _accept(gateway, caller, body, key)
    verdict = await dialects.settle(gateway, request, job_id)
    return verdict if isinstance(verdict, JSONResponse) else await _job(gateway, await fleet.get(), job_id)


@router.get("/job/{job_id}")
async def job(job_id: str, gateway: CurrentGateway, fleet: CurrentFleet, _: Reader) -> Job:
    """Return a job's status and, when it is completed, its result."""
    try:
        identity = UUID(job_id)
    except ValueError:
        raise UnknownEvaluation(job_id) from None
    return await _job(gateway, await fleet.get(), identity)


@router.get("/jobs")
async def jobs(gateway: CurrentGateway, fleet: CurrentFleet, _: Reader) -> dict[str, Any]:
    """Return the last hundred active jobs and the last hundred completed jobs."""
    view = await fleet.get()

    async def listed(done: bool) -> list[dict[str, Any]]:
        found = await gateway.read(reports.progress_of_batch, BATCH, done=done, limit=_SHOWN)
        return [
            {
                "job_id": progress.evaluation_id,
                "status": _status(progress),
                "problem_id": _given(progress.problem_label, "problem_"),
                "sample_id": _given(progress.kernel_label, "sample_"),
                **_moments(view, progress),
            }
            for progress in found
        ]

    return {"active_jobs": await listed(False), "completed_jobs": await listed(True)}


@router.get("/status")
async def status(gateway: CurrentGateway, fleet: CurrentFleet, _: Reader) -> dict[str, Any]:
    """Return the devices' states and the numbers of evaluations, completed ones of the last hour only."""
    view = await fleet.get()
    completed = await gateway.read(reports.outcomes, since=datetime.now(UTC) - timedelta(hours=1))
    return {
        "server_status": "running",
        "device_status": view.device_status,
        "queue_info": {
            "queued_jobs": view.total(EvaluationState.QUEUED),
            "active_jobs": view.total(EvaluationState.QUEUED) + view.total(EvaluationState.RUNNING),
            "completed_jobs": sum(completed.values()),
            "available_devices": sum(state == "idle" for state in view.device_status.values()),
        },
    }


async def _accept(gateway: Gateway, caller: Caller, body: EvaluationRequest, key: str | None) -> UUID:
    level = "" if body.level is None else f"level_{body.level}_"
    request = body.as_request(
        problem_label=f"{level}problem_{body.problem_id}", kernel_label=f"sample_{body.sample_id}", batch=BATCH
    )
    return (await dialects.accept(gateway, caller, request, key))[0]


async def _job(gateway: Gateway, view: View, job_id: UUID) -> Job:
    seen = await dialects.see(gateway, view, await gateway.read(reports.progress, job_id))
    status = _status(seen.progress)
    return Job(
        job_id=job_id,
        status=status,
        result=KernelExecResult(**seen.result) if status == "completed" else None,
        error=seen.error if status == "failed" else None,
        **_moments(view, seen.progress),
    )


def _status(progress: Progress) -> str:
    """Return the job's status. A job is ``failed`` if the fleet is to blame or the evaluation was cancelled."""
    if progress.state != EvaluationState.DONE:
        return progress.state
    return "failed" if progress.blame in (Blame.FLEET, Blame.NOBODY) else "completed"


def _moments(view: View, progress: Progress) -> dict[str, Any]:
    began = progress.started_at and progress.started_at.timestamp()
    ended = progress.finished_at and progress.finished_at.timestamp()
    return {
        "device": None if progress.device is None else view.name_of(progress.device),
        "queued_at": progress.submitted_at.timestamp(),
        "started_at": began,
        "completed_at": ended,
        "execution_time": None if began is None or ended is None else ended - began,
    }


def _given(label: str | None, prefix: str) -> int | str | None:
    """Return the part of a job's label that its client gave."""
    match = re.search(rf"{prefix}(.+)$", label or "")
    if match is None:
        return None
    return int(match[1]) if match[1].isdecimal() else match[1]


#: The routes of all drop-ins.
forms: Final = APIRouter()
for _router in (server.router, router, tasks.router):
    forms.include_router(_router)
