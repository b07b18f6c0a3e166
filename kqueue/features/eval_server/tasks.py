"""KernelGYM's form of the job routes: its client posts a task, polls the status and reads the result.

A task is an evaluation with an id that its client chose. ``POST /evaluate`` accepts this form and the form of ``jobs``.
``/evaluate/batch`` accepts several tasks, and ``/workflow/submit`` one in an envelope.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal, cast
from uuid import UUID

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from kqueue import contract
from kqueue.categories import Blame
from kqueue.contract import Bounded, Policy, Verdict
from kqueue.errors import BudgetSpent, InvalidRequest, UnknownEvaluation
from kqueue.evidence import Hack, Measurement
from kqueue.features.eval_server import dialects
from kqueue.features.eval_server.dialects import MODEL, MODEL_NEW, RESPONSES, SEED, TIMEOUT, KernelRequest, Seed
from kqueue.http.auth import Caller, Reader, Submitter
from kqueue.http.devices import CurrentFleet, View
from kqueue.http.failures import HttpError, describe
from kqueue.http.gateway import CurrentGateway, Gateway
from kqueue.kernelbench import error_code
from kqueue.states import EvaluationState, Priority, Purpose
from kqueue.store import reports
from kqueue.store.reports import Progress

router: Final = APIRouter(tags=["KernelGYM"])

#: Share of a task's timeout after which a submission is answered without a result. The client closes the connection
#: after the whole timeout, and polls after an answer.
_HELD: Final = 0.8
_CLASS: Final = "Model"
_WORKFLOW: Final = "kernelbench"
#: Names of states, and of the blame of tasks that are done. Other tasks are ``failed``.
_STATUSES: Final[Mapping[EvaluationState | Blame | None, str]] = {
    EvaluationState.QUEUED: "pending",
    EvaluationState.RUNNING: "processing",
    Blame.NONE: "completed",
    Blame.NOBODY: "cancelled",
}
_Id = Annotated[str, Field(pattern=r"^[^\x00]{1,100}$")]


class TaskRequest(KernelRequest):
    """One kernel to judge, in KernelGYM's form. Unknown fields are ignored."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "task_id": "softmax-001",
                "reference_code": MODEL,
                "kernel_code": MODEL_NEW,
                "backend": "triton",
            }
        }
    )

    task_id: _Id
    problem: str = Field(alias="reference_code", description="Source of the reference.")
    kernel: str = Field(alias="kernel_code", description="Source of the candidate.")
    entry_point: str = Field(
        _CLASS,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}$",
        description="Name of the reference's class. The candidate's class has this name with `New` appended.",
    )
    backend: str = Field("triton", description="Name of a backend, such as `cuda` or `triton`.")
    num_warmup: int = Field(3, ge=0, le=1000)
    seed_num: Seed = Field(None, alias="seed", description=SEED)
    timeout_s: Annotated[float, TIMEOUT] = 300
    measure_performance: bool | None = None
    run_performance: bool | None = Field(None, description="Overrides `measure_performance`.")
    detect_decoy_kernel: bool | None = Field(None, description="False to allow kernels that do no work.")
    reference_backend: Literal["pytorch", "compile", "torch_compile"] | None = Field(
        None, description="Baseline of the speedup: the eager reference, or the reference under `torch.compile`."
    )
    device_preference: str | None = Field(
        None, pattern=r"^cuda:[0-9]{1,4}$", description="A device number of `/health`. Its model's lane is used."
    )
    force_refresh: bool = Field(False, description="Judge the kernel again, even if this task has its result.")
    priority: Literal["low", "normal", "high"] | None = Field(
        "normal", description="`high` runs first if the token permits it. `normal` and `low` are batch work."
    )
    workflow: str | None = Field(_WORKFLOW, description="`kernelbench`.")

    @field_validator("workflow")
    @classmethod
    def _judged(cls, value: str | None) -> str | None:
        if value not in (None, _WORKFLOW):
            raise ValueError(f"only {_WORKFLOW!r} is supported, with a reference_code to judge the kernel against")
        return value

    def as_request(self, **arguments: Any) -> contract.Request:
        """Return the request for this task and further arguments, or raise InvalidRequest."""
        timed = self.measure_performance if self.run_performance is None else self.run_performance
        request = super().as_request(
            problem=_aliased(self.problem, self.entry_point, _CLASS),
            kernel=_aliased(self.kernel, f"{self.entry_point}New", f"{_CLASS}New"),
            measure_performance=timed is not False,
            purpose=Purpose.TRAIN,
            kernel_label=self.task_id,
            **arguments,
        )
        settings = request.settings
        compiled = self.reference_backend in ("compile", "torch_compile")
        timing = settings.timing.model_copy(update={"warmup": self.num_warmup, "compiled_baseline": compiled})
        policies = settings.policies
        if self.detect_decoy_kernel is False:
            policies = policies.model_copy(update={"decoys": Policy.ALLOW})
        settings = settings.model_copy(update={"timing": timing, "policies": policies})
        return request.model_copy(update={"settings": settings})


class TaskBatch(Bounded):
    """Several independent tasks."""

    batch_id: _Id
    tasks: list[TaskRequest] = Field(min_length=1)


class WorkflowRequest(Bounded):
    """A task in an envelope, whose fields override the task's own."""

    payload: TaskRequest

    @model_validator(mode="before")
    @classmethod
    def _opened(cls, value: Any) -> Any:
        given = cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}
        payload = given.get("payload")
        if not isinstance(payload, Mapping):
            return given
        inner = cast("Mapping[str, Any]", payload)
        outer = {name: given[name] for name in ("task_id", "force_refresh", "workflow") if given.get(name) is not None}
        return {"payload": {**inner, **outer}}


class TaskStatus(BaseModel):
    """A task's id, status and device."""

    task_id: str
    status: str = Field(examples=["processing"], description="`pending`, `processing`, `completed`, `failed`, ...")
    assigned_device: str | None = Field(None, examples=["cuda:0"])
    error_message: str | None = None


class TaskResult(BaseModel):
    """A task's result, with KernelGYM's fields. Times are medians in milliseconds."""

    task_id: str
    status: str = Field(examples=["completed"])
    compiled: bool | None = Field(default=None, description="Null if the kernel was not judged.")
    correctness: bool | None = Field(default=None, description="Null if the kernel was not judged.")
    decoy_kernel: bool | None = None
    reference_runtime: float | None = Field(default=None, description="-1.0 if not measured.")
    kernel_runtime: float | None = Field(default=None, description="-1.0 if not measured.")
    speedup: float | None = Field(default=None, description="0.0 if unknown.")
    metadata: dict[str, Any] | None = None
    error_message: str | None = None
    error_code: str | None = Field(default=None, examples=["COMPILATION_ERROR"])
    submitted_at: str
    completed_at: str | None = None
    processing_time: float | None = Field(default=None, description="Seconds from start to completion.")


class TaskBatchResult(BaseModel):
    """The results of a batch's tasks, in the order of the tasks."""

    batch_id: str
    total_tasks: int
    completed_tasks: int
    failed_tasks: int
    results: list[TaskResult]
    batch_status: str = Field(examples=["completed"], description="`processing` while a result is missing.")
    submitted_at: str
    completed_at: str | None = None


class WorkflowResult(BaseModel):
    """A task's result in an envelope."""

    task_id: str
    status: str = Field(examples=["completed"])
    result: TaskResult | None = Field(None, description="Null until the task ends.")
    error_message: str | None = None
    error_code: str | None = None
    completed_at: str | None = None


async def evaluate(
    body: TaskRequest, request: Request, gateway: Gateway, view: View, caller: Caller, key: str | None
) -> TaskResult | JSONResponse:
    """Accept a task and wait for its result. Answer with its status shortly before its client stops waiting.

    A repeated task is the same evaluation. If the fleet failed, the answer is a 503, and a repeated task is judged
    again.
    """
    evaluation_id = await _accept(body, gateway, view, caller, key)
    verdict = (await _wait(gateway, request, {evaluation_id}, _HELD * body.timeout_s)).get(evaluation_id)
    if verdict is not None and verdict.blame is Blame.FLEET:
        return dialects.refusal(verdict, request.url.path)
    return await _result(gateway, view, await gateway.read(reports.progress, evaluation_id), body.task_id)


@router.post("/evaluate/batch", responses=RESPONSES)
async def evaluate_batch(
    body: TaskBatch, request: Request, gateway: CurrentGateway, fleet: CurrentFleet, caller: Submitter
) -> TaskBatchResult:
    """Judge several tasks and answer with all results, or with the available ones after 80 % of the longest timeout.

    A task that is refused, or for which the fleet failed, has the status `failed`.
    """
    gateway.bound(len(body.tasks))
    begun, view = datetime.now(UTC).isoformat(), await fleet.get()

    async def accepted(task: TaskRequest) -> UUID | TaskResult:
        try:
            return await _accept(task, gateway, view, caller, None)
        except (InvalidRequest, BudgetSpent, HttpError) as error:
            code = "VALIDATION_ERROR" if isinstance(error, InvalidRequest) else describe(error, request.url.path).code
            return TaskResult(
                task_id=task.task_id, status="failed", error_message=str(error), error_code=code, submitted_at=begun
            )

    ids = await asyncio.gather(*map(accepted, body.tasks))
    missing = {one for one in ids if isinstance(one, UUID)}
    deadline = time.monotonic() + _HELD * max(task.timeout_s for task in body.tasks)
    while missing and (left_s := deadline - time.monotonic()) > 0 and not gateway.stopping.is_set():
        missing -= (await _wait(gateway, request, missing, left_s)).keys()
    results = [
        await _result(gateway, view, await gateway.read(reports.progress, one), task.task_id)
        if isinstance(one, UUID)
        else one
        for task, one in zip(body.tasks, ids, strict=True)
    ]
    states = [result.status for result in results]
    over = not {"pending", "processing"} & set(states)
    return TaskBatchResult(
        batch_id=body.batch_id,
        total_tasks=len(results),
        completed_tasks=states.count("completed"),
        failed_tasks=states.count("failed") + states.count("cancelled"),
        results=results,
        batch_status="completed" if over else "processing",
        submitted_at=begun,
        completed_at=datetime.now(UTC).isoformat() if over else None,
    )


@router.post("/workflow/submit", response_model=WorkflowResult, responses=RESPONSES)
async def submit_workflow(
    body: WorkflowRequest, request: Request, gateway: CurrentGateway, fleet: CurrentFleet, caller: Submitter
) -> WorkflowResult | JSONResponse:
    """Judge a task of the workflow `kernelbench` in the same way as `POST /evaluate`."""
    result = await evaluate(body.payload, request, gateway, await fleet.get(), caller, None)
    if isinstance(result, JSONResponse):
        return result
    fields = result.model_dump(include=WorkflowResult.model_fields.keys() - {"result"})
    return WorkflowResult(result=None if result.completed_at is None else result, **fields)


@router.get("/workers/status")
async def workers_status(fleet: CurrentFleet, _: Reader) -> dict[str, dict[str, Any]]:
    """Return the live workers by name."""
    view = await fleet.seen()
    return {
        worker.name: {
            "device": view.name_of(worker.device),
            "status": "online",
            "hostname": worker.host,
            "paused": worker.paused,
            "current_task": worker.busy_with,
        }
        for worker in view.workers
    }


@router.get("/status/{task_id:path}")
async def status(task_id: str, gateway: CurrentGateway, fleet: CurrentFleet, caller: Reader) -> TaskStatus:
    """Return the status of the last task with this id that the same token submitted."""
    seen = await dialects.see(gateway, await fleet.get(), await _latest(gateway, caller, task_id))
    return TaskStatus(
        task_id=task_id, status=_status(seen.progress), assigned_device=seen.device, error_message=seen.error
    )


@router.get("/results/{task_id:path}")
async def results(task_id: str, gateway: CurrentGateway, fleet: CurrentFleet, caller: Reader) -> TaskResult:
    """Return the result of the last task with this id that the same token submitted."""
    progress = await _latest(gateway, caller, task_id)
    if progress.state != EvaluationState.DONE:
        raise HttpError(404, f"{task_id} has no result yet: poll /status/{task_id}", code="not_finished")
    return await _result(gateway, await fleet.get(), progress, task_id)


async def _accept(body: TaskRequest, gateway: Gateway, view: View, caller: Caller, key: str | None) -> UUID:
    """Submit a task and return its evaluation's id."""
    preferred = body.device_preference
    wanted = body.as_request(
        lane="auto" if preferred is None else view.lane_towards(int(preferred.removeprefix("cuda:"))),
        batch=_batch(caller, body.task_id),
        priority=caller.priority if body.priority == "high" else Priority.BATCH,
    )
    fresh = body.force_refresh
    return (await dialects.accept(gateway, caller, wanted, key, stands_s=None, finished_counts=not fresh))[0]


async def _wait(gateway: Gateway, request: Request, ids: set[UUID], timeout_s: float) -> dict[UUID, Verdict]:
    """Return the first verdicts, or none after ``timeout_s`` or if the server stops. The client then polls.

    Every later server finds the task in the record.
    """
    try:
        return await gateway.wait_any(request, ids, timeout_s)
    except HttpError as error:
        if error.code != "stopping":
            raise
        return {}


def _batch(caller: Caller, task_id: str) -> str:
    """Return the batch of all evaluations of a task. Two tokens can use the same task id."""
    return f"task:{caller.token_id or 'local'}:{task_id}"


async def _latest(gateway: Gateway, caller: Caller, task_id: str) -> Progress:
    if "\0" not in task_id and len(task_id) <= 100:
        for done in (False, True):
            latest = await gateway.read(reports.progress_of_batch, _batch(caller, task_id), done=done, limit=1)
            if latest:
                return latest[0]
    raise UnknownEvaluation(task_id, what="the task id")


def _status(progress: Progress) -> str:
    """Return KernelGYM's status of a task. A kernel that was compiled, right or wrong, is ``completed``."""
    if progress.blame is Blame.CANDIDATE and progress.compiled:
        return "completed"
    return _STATUSES.get(progress.blame if progress.state == EvaluationState.DONE else progress.state, "failed")


async def _result(gateway: Gateway, view: View, progress: Progress, task_id: str) -> TaskResult:
    seen = await dialects.see(gateway, view, progress)
    result = TaskResult(task_id=task_id, status=_status(progress), submitted_at=progress.submitted_at.isoformat())
    result.error_message = seen.error
    if (verdict := seen.verdict) is None:
        return result
    assert progress.finished_at is not None
    result.completed_at = progress.finished_at.isoformat()
    if (began := progress.started_at) is not None:
        result.processing_time = (progress.finished_at - began).total_seconds()
    result.metadata = seen.result["metadata"] | _coverage(verdict)
    if not verdict.passed:
        result.error_code = error_code(verdict.category)
    if not verdict.judged:
        return result
    provenance = verdict.evidence.provenance
    result.compiled, result.correctness = bool(verdict.compiled), verdict.passed
    result.decoy_kernel = verdict.facts.hack is Hack.DECOY or (provenance is not None and provenance.decoy)
    if (compiled := verdict.evidence.compiled_baseline) is not None:
        verdict = verdict.model_copy(update={"baseline": compiled if isinstance(compiled, Measurement) else None})
    result.reference_runtime = -1.0 if verdict.baseline_ms is None else verdict.baseline_ms
    result.kernel_runtime = -1.0 if verdict.runtime_ms is None else verdict.runtime_ms
    result.speedup = verdict.speedup or 0.0
    return result


def _coverage(verdict: Verdict) -> dict[str, int | float]:
    """Return the figures by which KernelGYM's clients reward custom kernels. Empty without provenance."""
    provenance = verdict.evidence.provenance
    if provenance is None:
        return {}
    counts: dict[str, int | float] = {
        "num_custom_kernels": len(provenance.own),
        "num_total_kernels": len(provenance.own) + len(provenance.library) + len(provenance.unclear),
    }
    if verdict.runtime_ms is None:
        return counts
    total_us = 1e3 * verdict.runtime_ms
    return counts | {
        "custom_kernel_cuda_time_in_profiling_us": provenance.own_share * total_us,
        "total_kernel_run_time_in_profiling_us": total_us,
    }


def _aliased(source: str, given: str, wanted: str) -> str:
    """Return a source with the alias ``wanted`` for its class ``given``, if it has one. Lines keep their numbers."""
    if given == wanted or not re.search(rf"^class\s+{given}\b", source, re.MULTILINE):
        return source
    return f"{source}\n\n{wanted} = {given}\n"
