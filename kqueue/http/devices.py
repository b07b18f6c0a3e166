"""The state of the fleet. Its GPUs are numbered, for clients that expect a server with one machine."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final
from uuid import UUID

from fastapi import Depends, Request
from sqlalchemy import Engine

from kqueue import backends
from kqueue.contract import gpu_model
from kqueue.errors import ServiceError
from kqueue.http.failures import HttpError
from kqueue.http.gateway import Gateway
from kqueue.states import EvaluationState
from kqueue.store import reports
from kqueue.store.gpus import GpuStatus
from kqueue.store.reports.overview import unreadable
from kqueue.store.workers import LiveWorker

#: Time without a report from a GPU's supervisor after which the GPU is no longer listed.
_GONE_AFTER: Final = timedelta(days=1)
#: Time without a report after which a supervisor counts as dead. It reports its GPUs every few seconds.
_SILENT_AFTER: Final = timedelta(seconds=60)
#: Age in seconds at which a view of the fleet is read again. Requests get the old view until the new one is there.
_FRESH_S: Final = 1.0
#: Seconds that a request waits for a new view if the last one is older than `_STALE_S`.
_PATIENCE_S: Final = 2.0
_STALE_S: Final = 3.0
#: Age in seconds at which a view is not returned any more.
_GIVEN_UP_S: Final = 12.0


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU of the fleet.

    Attributes:
        id: its number in the fleet, which orders GPUs by host and then by index on the host.
        lanes: the lanes that its live workers serve.
        slots: the number of its live workers.
        idle: the number of live workers that would accept an evaluation now.
        attended: True if the supervisor of its host is alive. It acts on the GPU's state, also while the workers
            restart and none is live.
    """

    id: int
    gpu: GpuStatus
    lanes: tuple[str, ...]
    slots: int
    idle: int
    attended: bool

    @property
    def error(self) -> str | None:
        """The reason why it gets no evaluations, or None if it serves."""
        if self.gpu.paused is None and not self.slots:
            return f"no worker of it is alive on {self.gpu.host}"
        return self.gpu.paused

    @property
    def available(self) -> bool:
        """True if an evaluation would begin on it at once."""
        return self.error is None and self.idle > 0

    def summary(self) -> dict[str, Any]:
        """Return its fields in lists of devices."""
        fields = {
            "device_id": self.id,
            "name": self.gpu.name,
            "available": self.available,
            "status": "healthy" if self.error is None else "error",
            "slots": self.slots,
            "busy_slots": len(self.gpu.running),
        }
        return fields | ({"error": self.error} if self.error else {})


@dataclass(frozen=True, slots=True)
class View:
    """The fleet at one moment.

    Attributes:
        backlog: by lane, the numbers of evaluations that are ``queued`` and ``running``.
        records: features' records of the last day, by feature.
    """

    devices: tuple[Device, ...]
    workers: tuple[LiveWorker, ...]
    backlog: dict[str, dict[EvaluationState, int]]
    records: dict[str, Any]

    def hiding(self, ids: Collection[UUID]) -> View:
        """Return this view without evaluations that the caller cannot read."""
        return replace(
            self,
            devices=tuple(replace(device, gpu=device.gpu.hiding(ids)) for device in self.devices),
            workers=tuple(worker.hiding(ids) for worker in self.workers),
        )

    @property
    def lanes(self) -> Counter[str]:
        """The number of live workers on each lane."""
        return Counter(lane for worker in self.workers for lane in worker.lanes)

    @property
    def backends(self) -> list[str]:
        """The kernel backends that some live worker can judge."""
        if "gpu" in self.lanes:
            return list(backends.registered())
        return backends.on_cpu() if "cpu" in self.lanes else []

    def total(self, state: EvaluationState) -> int:
        """Return the number of evaluations in a state, ``queued`` or ``running``, on all lanes."""
        return sum(counts[state] for counts in self.backlog.values())

    def device(self, number: int) -> Device:
        """Return the GPU with this number, or raise an HttpError 400."""
        for device in self.devices:
            if device.id == number:
                return device
        names = ", ".join(f"{d.id} ({d.gpu.name}, {d.gpu.host})" for d in self.devices)
        advice = f"its devices are {names}" if names else "it has no GPU, so omit the device"
        raise HttpError(400, f"this fleet has no device {number}: {advice}", code="unknown_device")

    def lane_towards(self, number: int) -> str:
        """Return the lane of a GPU's model if it serves, else ``auto``. Raise an HttpError 400 for an unknown GPU."""
        device = self.device(number)
        return "auto" if device.error else f"gpu.{gpu_model(device.gpu.name)}"

    def numbered(self, uuid: str) -> int | None:
        """Return the number of a GPU, or None for another device."""
        return next((device.id for device in self.devices if device.gpu.uuid == uuid), None)

    def name_of(self, uuid: str) -> str:
        """Return a device's name in torch's form with the fleet's number, or the UUID of a GPU that is gone."""
        number = self.numbered(uuid)
        return uuid if number is None else f"cuda:{number}"

    @property
    def device_status(self) -> dict[str, str]:
        """The state of each device, and of ``cpu`` if it serves: ``idle`` (a slot is free), ``busy`` or ``error``."""
        states = {
            f"cuda:{device.id}": "error" if device.error else "idle" if device.idle else "busy"
            for device in self.devices
        }
        cpu = [worker for worker in self.workers if worker.device == "cpu"]
        if cpu:
            serving = [worker for worker in cpu if worker.paused is None]
            idle = any(worker.busy_with is None for worker in serving)
            states["cpu"] = "error" if not serving else "idle" if idle else "busy"
        return states

    @property
    def architectures(self) -> str:
        """The GPUs' compute capabilities in the form of ``TORCH_CUDA_ARCH_LIST``: ``8.0;9.0``, or ``not set``."""
        capabilities = {device.gpu.facts.get("compute_capability") for device in self.devices}
        return ";".join(sorted(str(one) for one in capabilities if one)) or "not set"


def view(engine: Engine, *, within_s: float) -> View:
    """Read the state of the fleet. A worker counts as live for ``within_s`` seconds after its last heartbeat."""
    now, newest = reports.fleet(engine, within_s=within_s), datetime.now(UTC) - _GONE_AFTER
    known = enumerate(gpu for gpu in now.gpus if gpu.seen_at >= newest)
    devices = tuple(_device(*one, now.workers) for one in known)
    return View(devices, tuple(now.workers), reports.backlog(engine), now.records)


def _device(number: int, gpu: GpuStatus, live: Sequence[LiveWorker]) -> Device:
    mine = [worker for worker in live if worker.device == gpu.uuid]
    return Device(
        id=number,
        gpu=gpu,
        lanes=tuple(sorted({lane for worker in mine for lane in worker.lanes})),
        slots=len(mine),
        idle=sum(worker.paused is None and worker.busy_with is None for worker in mine),
        attended=bool(mine) or datetime.now(UTC) - gpu.seen_at < _SILENT_AFTER,
    )


class Fleet:
    """The last view of the fleet. A background task renews it, so that no request waits for the database."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._last: View | None = None
        self._read_at = float("-inf")
        self._reading: asyncio.Task[None] | None = None
        self._error: ServiceError | None = None

    async def get(self) -> View:
        """Return the last view, which is about one second old.

        Raise an HttpError 503 if the database has not answered for twelve seconds.
        """
        if self._reading is None and time.monotonic() - self._read_at > _FRESH_S:
            self._reading = asyncio.create_task(self._read())
        if self._reading is not None and time.monotonic() - self._read_at > _STALE_S:
            await asyncio.wait([self._reading], timeout=_PATIENCE_S)
        if self._error is not None:
            raise self._error
        if self._last is None or time.monotonic() - self._read_at > _GIVEN_UP_S:
            raise HttpError(503, "the database has not answered for a while", code="database_unavailable")
        return self._last

    async def seen(self) -> View:
        """Return the last view (:meth:`get`) without evaluations that the request's caller cannot read."""
        view = await self.get()
        known = [device.gpu for device in view.devices]
        return view.hiding(await self._gateway.read(unreadable, view.workers, known))

    async def renewed(self) -> View:
        """Read and return a new view, or raise ServiceError if the database cannot be used."""
        self._last = await self._gateway.look(view, within_s=self._gateway.config.live_s)
        self._read_at = time.monotonic()
        return self._last

    async def _read(self) -> None:
        try:
            await self.renewed()
        except ServiceError as error:
            self._error = error
            self._read_at = time.monotonic()
        else:
            self._error = None
        finally:
            self._reading = None


def current(request: Request) -> Fleet:
    """Return the fleet. Routes depend on this function."""
    return request.app.state.fleet


CurrentFleet = Annotated[Fleet, Depends(current)]
