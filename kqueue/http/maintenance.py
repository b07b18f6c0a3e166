"""The routes by which an operator cleans up a fleet and tests its GPUs.

The server only writes requests into the database. The GPUs' supervisors carry them out, whether or not a client waits.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query
from sqlalchemy import Engine

from kqueue import broker, sweeper
from kqueue.config import Config
from kqueue.errors import DatabaseUnavailable
from kqueue.http import failures
from kqueue.http.auth import Admin
from kqueue.http.devices import CurrentFleet, Device, Fleet
from kqueue.http.failures import HttpError
from kqueue.http.gateway import ENDED, Caller, CurrentGateway, Gateway
from kqueue.states import GpuState
from kqueue.store import gpus
from kqueue.store.engine import lacks_right
from kqueue.sweeper import SweepReport

router: Final = APIRouter(tags=["maintenance"])

#: Seconds between two reads of a GPU's state.
_LOOK_S: Final = 0.25
#: Seconds after the grace period in which workers end and start and the GPU is tested.
_RESET_S: Final = 180.0
_Wait = Annotated[float, Query(ge=0, le=600, description="Seconds to wait for tests. They continue after that.")]


@router.post("/cleanup")
async def cleanup(gateway: CurrentGateway, fleet: CurrentFleet, caller: Admin, wait_s: _Wait = 60.0) -> dict[str, Any]:
    """Clean up the fleet, and test every GPU that is not drained.

    The clean-up ends attempts whose worker is gone and repeats them, gives up silent workers, sends messages again that
    Redis lost, and removes data that is older than the retention settings. A GPU gets no evaluation until it passes its
    test. A GPU with wrongly judged probes is not tested.
    """
    swept = await gateway.read(_sweep, gateway.config)
    view = await fleet.renewed()
    # A test can return neither a drained GPU nor one with wrongly judged probes to service.
    attended = (device for device in view.devices if device.attended)
    chosen = [one for one in attended if one.gpu.state != GpuState.DRAINED and not one.gpu.is_left_alone]
    for device in chosen:
        if device.gpu.state == GpuState.SERVING:
            await gateway.read(gpus.ask_for_test, device.gpu.uuid, reason="a clean-up requested a test")
        elif device.gpu.failures:
            await gateway.read(gpus.resume, device.gpu.uuid)
    over = await _until_decided(gateway, caller, fleet, {device.gpu.uuid for device in chosen}, wait_s)
    return {
        "status": "cleanup completed" if over else "cleanup completed, tests continue",
        "message": "swept" if swept else "the workers' supervisors sweep every few seconds",
        "swept": swept
        and {name: value for name, value in dataclasses.asdict(swept).items() if name != "lost"}
        | {"lost": len(swept.lost)},
        "devices": [device.summary() for device in (await fleet.get()).devices],
    }


@router.post("/reset_gpu/{device_id}", responses=failures.documented(400, 409))
async def reset_gpu(
    device_id: int,
    gateway: CurrentGateway,
    fleet: CurrentFleet,
    caller: Admin,
    grace_s: Annotated[float, Query(ge=0, le=3600, description="Seconds in which its evaluations can end.")] = 30,
) -> dict[str, Any]:
    """Take a GPU out of service, end its workers, test it, and return it to service or keep it quarantined.

    Evaluations that do not end within `grace_s` are aborted and repeated. All processes that the workers started end
    with them. The hardware is not reset. A GPU that an operator drained stays drained. A GPU with wrongly judged probes
    is refused with 409.
    """
    device = (await fleet.renewed()).device(device_id)
    if not device.attended:
        raise HttpError(503, f"device {device_id}: {device.error}", code="gpu_unattended")
    begun = time.monotonic()
    uuid = device.gpu.uuid
    reason = f"a reset was requested by {caller.name}"
    if not await gateway.read(gpus.reset, uuid, reason=reason, grace_s=grace_s):
        detail = f"{device.gpu.paused}. A test cannot end that: run `kqueue gpu resume`"
        raise HttpError(409, detail, code="gpu_quarantined")
    over = await _until_decided(gateway, caller, fleet, {uuid}, grace_s + _RESET_S)
    now = (await fleet.get()).device(device_id)
    status, message = GpuState.QUARANTINED if over else "still being reset", now.error
    if now.error is None:
        status, message = "reset", "its workers were restarted, it passed its test and is in service"
    elif over and now.gpu.state == GpuState.DRAINED:
        outcome = (
            "it failed its test"
            if now.gpu.failures
            else "it passed its test"
            if device.gpu.state == GpuState.DRAINED
            else "it was not tested"
        )
        status, message = GpuState.DRAINED, f"{outcome}. An operator drained it, and it stays drained until resumed"
    return now.summary() | {"status": status, "message": message, "seconds": time.monotonic() - begun}


@router.post("/reset_devices")
async def reset_devices(
    gateway: CurrentGateway, fleet: CurrentFleet, caller: Admin, wait_s: _Wait = 60.0
) -> dict[str, Any]:
    """Return drained GPUs to service, and test quarantined GPUs at once.

    A GPU with wrongly judged probes keeps its state.
    """
    every = (await fleet.renewed()).devices
    chosen = [device for device in every if device.gpu.state != GpuState.SERVING and not device.gpu.is_left_alone]
    for device in chosen:
        await gateway.read(gpus.resume, device.gpu.uuid)
    over = await _until_decided(
        gateway, caller, fleet, {device.gpu.uuid for device in chosen if device.attended}, wait_s
    )
    view = await fleet.get()
    return {
        "status": "device pool reset" if over else "device pool reset, tests continue",
        "available_devices": [device.id for device in view.devices if device.available],
        "devices": [device.summary() for device in view.devices],
    }


def _sweep(engine: Engine, config: Config) -> SweepReport | None:
    """Sweep once and return the report, or None without the right to. The workers' supervisors sweep regularly."""
    app = broker.make_app(config)
    try:
        return sweeper.sweep(engine, app, retry_delay_s=config.retry_delay_s, config=config)
    except DatabaseUnavailable as error:
        if lacks_right(error):
            return None
        raise
    finally:
        app.close()


async def _until_decided(gateway: Gateway, caller: Caller, fleet: Fleet, uuids: set[str], timeout_s: float) -> bool:
    """Wait until each of the GPUs serves or failed its test. Return False at the timeout or if the server stops."""
    deadline = time.monotonic() + timeout_s
    async with gateway.held(caller) as ended:
        while True:
            view = await fleet.renewed()
            if all(_decided(device) for device in view.devices if device.gpu.uuid in uuids):
                return True
            if ended.done():
                raise HttpError(401, ENDED)
            if time.monotonic() >= deadline or gateway.stopping.is_set():
                return False
            await asyncio.sleep(_LOOK_S)


def _decided(device: Device) -> bool:
    gpu = device.gpu
    if gpu.state == GpuState.DRAINED:
        return gpu.reset_at is None and gpu.check_at is None
    # A test that could not run is repeated later and decides nothing.
    has_failed = gpu.failures > 0 and gpu.reset_at is None and not gpu.due and gpu.state != GpuState.SERVING
    return device.error is None or has_failed
