"""The drop-in for KernelBench's ``simple_eval_server``, with the same routes, fields and results."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from kqueue import backends
from kqueue.categories import Blame
from kqueue.features.eval_server import dialects
from kqueue.features.eval_server.dialects import MODEL, MODEL_NEW, RESPONSES, IdempotencyKey, KernelRequest
from kqueue.http.auth import Anybody, Reader, Submitter
from kqueue.http.devices import CurrentFleet, Device
from kqueue.http.gateway import CurrentGateway
from kqueue.states import EvaluationState
from kqueue.store import gpus, reports

router: Final = APIRouter(tags=["simple_eval_server"])

_SERVICE: Final = "kqueue"
#: Maximum age of the attempts that `/fault_statistics` counts.
_FAULTS_OF: Final = timedelta(days=1)


class EvalRequest(KernelRequest):
    """One kernel to judge. Unknown fields are ignored, and the result's metadata names them."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "example": {"original_model_src": MODEL, "custom_model_src": MODEL_NEW, "backend": "triton"}
        },
    )

    problem: str = Field(
        alias="original_model_src", description="Source of the reference: `Model`, `get_inputs`, `get_init_inputs`."
    )
    kernel: str = Field(alias="custom_model_src", description="Source of the candidate: `ModelNew`.")
    verbose: bool = Field(False, description="Add the candidate's output as `metadata.log`.")
    measure_performance: bool = True
    preferred_device: int | None = Field(None, description="A `device_id` of `/health`. Its model's lane is used.")


class KernelExecResult(BaseModel):
    """KernelBench's result. Times are in milliseconds, or -1.0 if not measured."""

    compiled: bool
    correctness: bool
    metadata: dict[str, Any] = Field(
        description="`category`, `blame`, `evaluation_id`, `message`, `device_id` and KernelBench's own entries."
    )
    runtime: float
    runtime_stats: dict[str, Any]
    ref_runtime: float
    ref_runtime_stats: dict[str, Any]


@router.post("/eval", response_model=KernelExecResult, responses=RESPONSES)
async def evaluate(
    body: EvalRequest,
    request: Request,
    gateway: CurrentGateway,
    fleet: CurrentFleet,
    caller: Submitter,
    key: IdempotencyKey = None,
) -> dict[str, Any] | JSONResponse:
    """Judge a kernel and answer with KernelBench's result.

    Every outcome for which the kernel or the problem is to blame is a 200. A client that disconnects ends its wait, not
    the evaluation. If it repeats the request, it gets the evaluation's result.
    """
    preferred = body.preferred_device
    lane = "auto" if preferred is None else (await fleet.get()).lane_towards(preferred)
    wanted = body.as_request(measure_performance=body.measure_performance, lane=lane)
    evaluation_id, joined = await dialects.accept(gateway, caller, wanted, key)
    verdict = await dialects.settle(gateway, request, evaluation_id)
    if isinstance(verdict, JSONResponse):
        return verdict
    progress = await gateway.read(reports.progress, evaluation_id)
    result = (await dialects.see(gateway, await fleet.get(), progress, verdict)).result
    more: dict[str, Any] = {"joined": joined}
    if preferred is not None:
        more["preferred_device"] = preferred
    if body.model_extra:
        more["ignored_fields"] = sorted(body.model_extra)
    if body.verbose:
        more["log"] = verdict.log
    result["metadata"] |= more
    return result


@router.get("/")
async def about(fleet: CurrentFleet, _: Reader) -> dict[str, Any]:
    """Name the server, its version and the backends."""
    view = await fleet.get()
    return {
        "service": _SERVICE,
        "message": "kqueue is running",
        "version": version("kqueue"),
        "status": "running",
        "cuda_available": bool(view.devices),
        "num_gpus": len(view.devices),
        "backends": view.backends,
        "features": [
            "a separate sealed process and CUDA context for each kernel",
            "timing and verdict outside that process",
            "exactly one verdict for every accepted evaluation, whatever fails",
        ],
    }


@router.head("/health/", include_in_schema=False)
@router.get("/health/", include_in_schema=False)
@router.head("/health", include_in_schema=False)
@router.get("/health", openapi_extra={"security": [{}]})
async def health(fleet: CurrentFleet, caller: Anybody) -> dict[str, Any]:
    """Return the state of the fleet, about one second old. The answer never waits for an evaluation.

    `status` is `healthy`, or `degraded` if no worker accepts evaluations or a GPU is out of service. A request without
    a credential gets only this field.
    """
    view = await fleet.get()
    available = [device.id for device in view.devices if device.available]
    failing = [device for device in view.devices if device.error]
    serving = [worker for worker in view.workers if worker.paused is None]
    status = {"status": "healthy" if serving and not failing else "degraded"}
    if caller is None:
        return status
    return status | {
        "cuda_available": bool(view.devices),
        "supported_backends": view.backends,
        "total_gpu_devices": len(view.devices),
        "available_gpu_devices": len(available),
        "busy_gpu_devices": len(view.devices) - len(available) - len(failing),
        "failing_gpu_devices": len(failing),
        "available_device_ids": available,
        "cuda_arch_list": view.architectures,
        "devices": [device.summary() for device in view.devices],
        "isolation": "process",
        "queued": view.total(EvaluationState.QUEUED),
        "running": view.total(EvaluationState.RUNNING),
        "queue": view.backlog,
        "workers": [
            {
                "name": worker.name,
                "host": worker.host,
                "lanes": worker.lanes,
                "device_id": view.numbered(worker.device),
                "state": "paused" if worker.paused else "idle" if worker.busy_with is None else "busy",
                "paused": worker.paused,
            }
            for worker in view.workers
        ],
        "version": version("kqueue"),
    }


@router.get("/gpu_status")
async def gpu_status(fleet: CurrentFleet, _: Reader) -> dict[str, Any]:
    """Return every GPU with its host's last readings (`facts`). Memory is in bytes and covers all processes."""
    view = await fleet.get()
    status = {
        "total_devices": len(view.devices),
        "devices": [_in_full(device) for device in view.devices],
        "semaphore_permits": sum(device.idle for device in view.devices if device.error is None),
    }
    return status if view.devices else {"error": "this fleet has no GPU", **status}


def _in_full(device: Device) -> dict[str, Any]:
    used = device.gpu.facts.get("memory_used_bytes")
    return device.summary() | {
        "memory_allocated": used,
        "memory_cached": used,
        "compute_capability": device.gpu.facts.get("compute_capability"),
        "uuid": device.gpu.uuid,
        "host": device.gpu.host,
        "index": device.gpu.index,
        "lanes": device.lanes,
        "state": device.gpu.state,
        "since": device.gpu.since,
        "facts": device.gpu.facts,
    }


@router.get("/backend_info")
async def backend_info(fleet: CurrentFleet, _: Reader) -> dict[str, Any]:
    """Return the backends that the fleet can judge."""
    view = await fleet.get()
    return {
        "supported_backends": view.backends,
        "default_backend": "cuda",
        "backend_descriptions": {name: backends.find(name).description for name in view.backends},
        "cuda_available": bool(view.devices),
        "triton_available": "triton" in view.backends,
        "process_isolation": True,
        "cuda_arch_list": view.architectures,
    }


@router.get("/fault_statistics")
async def fault_statistics(gateway: CurrentGateway, fleet: CurrentFleet, _: Reader) -> dict[str, Any]:
    """Return the failed attempts of the last 24 hours by GPU.

    `per_device_faults` counts failures of the fleet, `outcomes` all outcomes by category. Faults do not take a GPU out
    of service. Only failed tests do: `max_faults_threshold` is the number of consecutive failed tests.
    """
    view, since = await fleet.get(), datetime.now(UTC) - _FAULTS_OF
    counted = await gateway.read(reports.attempts_by_device, since=since)
    faults = {
        uuid: sum(number for category, number in categories.items() if category.blame is Blame.FLEET)
        for uuid, categories in counted.items()
    }
    return {
        "per_device_faults": {device.id: faults.get(device.gpu.uuid, 0) for device in view.devices},
        "total_faults": sum(faults.values()),
        "max_faults_threshold": gpus.QUARANTINED_AFTER,
        "devices_near_limit": [device.id for device in view.devices if device.gpu.failures or device.error],
        "outcomes": {device.id: counted.get(device.gpu.uuid, {}) for device in view.devices},
        "since": since,
    }
