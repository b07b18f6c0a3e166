"""KernelGYM's form of the job routes: its client posts a task, then polls its status and fetches its result.

A task is an evaluation, found again under the id that its client chose. ``POST /evaluate`` takes this form beside that
of :mod:`kqueue.http.jobs`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from kqueue import contract, kernelbench
from kqueue.categories import Blame, Category
from kqueue.contract import Bounded, Policy, Verdict
from kqueue.errors import UnknownEvaluation
from kqueue.evidence import Hack, Measurement
from kqueue.http import joining
from kqueue.http.auth import Caller, Reader
from kqueue.http.devices import CurrentFleet, View
from kqueue.http.eval_server import result_of
from kqueue.http.failures import HttpError
from kqueue.http.gateway import CurrentGateway, Gateway
from kqueue.states import EvaluationState
from kqueue.store import reports
from kqueue.store.reports import Progress

router: Final = APIRouter(tags=["KernelGYM"])

#: The share of a task's timeout for which the answer to its submission is held back. Its client gives up its
#: connection after the whole timeout, and polls after an answer.
_HELD: Final = 0.8
_CLASS: Final = "Model"


class TaskRequest(Bounded):
    """One kernel to judge, in KernelGYM's form. Unknown fields are ignored."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "task_id": "softmax-001",
                "reference_code": "import torch\nclass Model(torch.nn.Module): ...",
                "kernel_code": "import torch\nclass ModelNew(torch.nn.Module): ...",
                "backend": "triton",
            }
        }
    )

    task_id: Annotated[str, Field(pattern=r"^[^\x00]{1,100}$")]
    reference_code: str = Field(description="Source of the reference.")
    kernel_code: str = Field(description="Source of the candidate.")
    entry_point: str = Field(
        _CLASS,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}$",
        description="The reference's class; the candidate's has `New` at its end.",
    )
    backend: str = Field("triton", description="`cuda`, `triton`, `torch`, `cpp` or `cupy`.")
    num_correct_trials: int = Field(5, ge=1, le=100)
    num_perf_trials: int = Field(100, ge=0, le=10_000)
    num_warmup: int = Field(3, ge=0, le=1000)
    seed: int = Field(42, ge=0, lt=2**63, description="Set before both constructors.")
    timeout: float = Field(
        300, gt=0, le=3600, description="Seconds that no phase of the execution may exceed; queueing does not count."
    )
    measure_performance: bool | None = None
    run_performance: bool | None = Field(None, description="Overrides `measure_performance`.")
    detect_decoy_kernel: bool | None = Field(None, description="False: kernels that do no work are not looked for.")
    reference_backend: Literal["pytorch", "compile", "torch_compile"] | None = Field(
        None, description="What the speedup is taken against: the reference as it is, or under `torch.compile`."
    )
    device_preference: str | None = Field(
        None, pattern=r"^cuda:[0-9]{1,4}$", description="A device of `/health` by number: its model's lane is used."
    )
    force_refresh: bool = Field(False, description="Judge anew what has been judged under this id.")
    workflow: Literal["kernelbench"] | None = "kernelbench"

    def as_request(self, lane: str, batch: str) -> contract.Request:
        """Return the request for this task.

        Raises:
            InvalidRequest: a field is wrong; the message names it.
        """
        timed = self.measure_performance if self.run_performance is None else self.run_performance
        request = kernelbench.request_of(
            _aliased(self.reference_code, self.entry_point, _CLASS),
            _aliased(self.kernel_code, f"{self.entry_point}New", f"{_CLASS}New"),
            backend=self.backend,
            seed_num=self.seed,
            num_correct_trials=self.num_correct_trials,
            num_perf_trials=self.num_perf_trials,
            measure_performance=timed is not False,
            timeout_s=self.timeout,
            lane=lane,
            kernel_label=self.task_id,
            batch=batch,
        )
        settings = request.settings
        compiled = self.reference_backend in ("compile", "torch_compile")
        timing = settings.timing.model_copy(update={"warmup": self.num_warmup, "compiled_baseline": compiled})
        policies = settings.policies
        if self.detect_decoy_kernel is False:
            policies = policies.model_copy(update={"decoys": Policy.ALLOW})
        settings = settings.model_copy(update={"timing": timing, "policies": policies})
        return request.model_copy(update={"settings": settings})


class TaskStatus(BaseModel):
    """A task, and where it stands."""

    task_id: str
    status: str = Field(examples=["processing"], description="`pending`, `processing`, `completed`, `failed`, ...")
    assigned_device: str | None = Field(None, examples=["cuda:0"])
    error_message: str | None = None


class TaskResult(BaseModel):
    """A task's result, with KernelGYM's fields. Times are medians in milliseconds."""

    task_id: str
    status: str = Field(examples=["completed"])
    compiled: bool | None = Field(None, description="Null if nothing is known of the kernel.")
    correctness: bool | None = Field(None, description="Null if nothing is known of the kernel.")
    decoy_kernel: bool | None = None
    reference_runtime: float | None = Field(None, description="-1.0 if no time was taken.")
    kernel_runtime: float | None = Field(None, description="-1.0 if no time was taken.")
    speedup: float | None = Field(None, description="0.0 if none is known.")
    metadata: dict[str, Any] | None = None
    error_message: str | None = None
    error_code: str | None = Field(None, examples=["COMPILATION_ERROR"])
    submitted_at: str
    completed_at: str | None = None
    processing_time: float | None = Field(None, description="Seconds from start to completion.")


async def evaluate(
    body: TaskRequest, request: Request, gateway: Gateway, view: View, caller: Caller, key: str | None
) -> TaskResult | JSONResponse:
    """Accept a task and wait for its result, but no longer than its client does: then answer with its status.

    The same task again is the same evaluation. If the fleet failed, the answer is a 503 and the next one judges anew.
    """
    lane = "auto"
    if body.device_preference is not None:
        lane = view.lane_towards(int(body.device_preference.removeprefix("cuda:")))
    wanted = body.as_request(lane, _batch(caller, body.task_id))
    evaluation_id, _ = await joining.accept(
        gateway,
        caller,
        wanted,
        wanted.model_dump_json() if key is None else key,
        finished_counts=not body.force_refresh,
    )
    verdict = await gateway.wait(request, evaluation_id, _HELD * body.timeout)
    if verdict is not None and verdict.blame is Blame.FLEET:
        return joining.refusal(verdict, request.url.path)
    return await _result(gateway, view, await gateway.read(reports.progress, evaluation_id), body.task_id)


@router.get("/status/{task_id:path}")
async def status(task_id: str, gateway: CurrentGateway, fleet: CurrentFleet, caller: Reader) -> TaskStatus:
    """Return where the last task of this id stands that the same token submitted."""
    progress = await _latest(gateway, caller, task_id)
    view = await fleet.get()
    verdict = await gateway.client.verdict(progress.evaluation_id)
    return TaskStatus(
        task_id=task_id,
        status=_status(progress),
        assigned_device=None if progress.device is None else view.name_of(progress.device),
        error_message=None if verdict is None or verdict.passed else f"{verdict.category}: {verdict.message}",
    )


@router.get("/results/{task_id:path}")
async def results(task_id: str, gateway: CurrentGateway, fleet: CurrentFleet, caller: Reader) -> TaskResult:
    """Return the result of the last task of this id that the same token submitted."""
    progress = await _latest(gateway, caller, task_id)
    if progress.state != EvaluationState.DONE:
        raise HttpError(404, f"{task_id} has no result yet: ask /status/{task_id}", code="not_finished")
    return await _result(gateway, await fleet.get(), progress, task_id)


def _batch(caller: Caller, task_id: str) -> str:
    """The batch of all evaluations of a task. Two tokens may use the same id."""
    return f"task:{caller.token_id or 'local'}:{task_id}"


async def _latest(gateway: Gateway, caller: Caller, task_id: str) -> Progress:
    if "\0" not in task_id and len(task_id) <= 100:
        for done in (False, True):
            found = await gateway.read(reports.progress_of_batch, _batch(caller, task_id), done=done, limit=1)
            if found:
                return found[0]
    raise UnknownEvaluation(task_id, what="the task id")


def _status(progress: Progress) -> str:
    """KernelGYM's word for a task's state. What a kernel did, right or wrong, is ``completed``."""
    match progress.state, progress.blame:
        case EvaluationState.QUEUED, _:
            return "pending"
        case EvaluationState.RUNNING, _:
            return "processing"
        case _, Blame.NONE | Blame.CANDIDATE:
            return "completed"
        case _, Blame.NOBODY:
            return "cancelled"
        case _:
            return "failed"


async def _result(gateway: Gateway, view: View, progress: Progress, task_id: str) -> TaskResult:
    done = progress.state == EvaluationState.DONE
    verdict = await gateway.client.verdict(progress.evaluation_id) if done else None
    known: dict[str, Any] = {}
    if verdict is not None:
        assert progress.finished_at is not None
        began = progress.started_at
        known = {
            **_of_verdict(verdict, (await result_of(gateway, view, verdict))["metadata"]),
            "completed_at": progress.finished_at.isoformat(),
            "processing_time": None if began is None else (progress.finished_at - began).total_seconds(),
        }
    return TaskResult(
        task_id=task_id, status=_status(progress), submitted_at=progress.submitted_at.isoformat(), **known
    )


def _of_verdict(verdict: Verdict, metadata: dict[str, Any]) -> dict[str, Any]:
    message = None if verdict.passed else f"{verdict.category}: {verdict.message}"
    told = {"metadata": metadata, "error_message": message, "error_code": _error_code(verdict, metadata)}
    if not verdict.judged:
        return told
    provenance = verdict.evidence.provenance
    compiled = verdict.evidence.compiled_baseline
    reference, speedup = verdict.baseline_ms, verdict.speedup
    if compiled is not None:
        reference, speedup = None, None
        if isinstance(compiled, Measurement):
            reference = compiled.median_ms
            speedup = verdict.model_copy(update={"baseline": compiled}).speedup
    return told | {
        "compiled": bool(verdict.compiled),
        "correctness": verdict.passed,
        "decoy_kernel": verdict.facts.hack is Hack.DECOY or (provenance is not None and provenance.decoy),
        "reference_runtime": -1.0 if reference is None else reference,
        "kernel_runtime": -1.0 if verdict.runtime_ms is None else verdict.runtime_ms,
        "speedup": speedup or 0.0,
    }


def _error_code(verdict: Verdict, metadata: dict[str, Any]) -> str | None:
    match verdict.category, verdict.blame:
        case _, Blame.NONE:
            return None
        case _, Blame.PROBLEM:
            return "VALIDATION_ERROR"
        case _, Blame.FLEET | Blame.NOBODY:
            return "SYSTEM_ERROR"
        case Category.SYNTAX_ERROR, _:
            return "SYNTAX_ERROR"
        case Category.TIMEOUT, _:
            return "TIMEOUT_ERROR"
        case _:
            keys = {"compilation_error": "COMPILATION_ERROR", "correctness_issue": "CORRECTNESS_ERROR"}
            return next((code for key, code in keys.items() if key in metadata), "RUNTIME_ERROR")


def _aliased(source: str, given: str, wanted: str) -> str:
    """Return a source in which ``wanted`` names its class ``given``, if it has one. Lines keep their numbers."""
    if given == wanted or not re.search(rf"^class\s+{given}\b", source, re.MULTILINE):
        return source
    return f"{source}\n\n{wanted} = {given}\n"
