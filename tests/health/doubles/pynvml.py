"""A double of NVML that returns the GPU facts in the adjacent file `state.json`.

The constants and the exception come from the real library.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_spec = importlib.machinery.PathFinder.find_spec("pynvml", [p for p in sys.path if p.endswith("site-packages")])
assert _spec is not None
assert _spec.loader is not None
_true = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_true)
globals().update({name: value for name, value in vars(_true).items() if not name.startswith("__")})
NVMLError: Any = _true.NVMLError
_STATE = Path(__file__).with_name("state.json")
_told: set[int] = set()


def _state() -> dict[str, Any]:
    return json.loads(_STATE.read_text())


def _gpu(handle: str) -> dict[str, Any]:
    gpu = next((gpu for gpu in _state()["gpus"] if gpu["uuid"] == handle), None)
    if gpu is None or gpu.get("lost"):
        raise NVMLError(_true.NVML_ERROR_GPU_IS_LOST)
    return gpu


def _of(handle: str, name: str) -> Any:
    gpu = _gpu(handle)
    if name not in gpu:
        raise NVMLError(_true.NVML_ERROR_NOT_SUPPORTED)
    return gpu[name]


def _fact(name: str) -> Callable[..., Any]:
    """Return a function that returns this fact of a GPU and ignores other arguments."""
    return lambda handle, *_: _of(handle, name)


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_: value


nvmlInit = nvmlShutdown = nvmlDeviceRegisterEvents = _always(None)
nvmlSystemGetDriverVersion = _always("0.0")
nvmlEventSetCreate = _always("events")
nvmlDeviceGetGraphicsRunningProcesses = _always([])
nvmlDeviceGetName = _fact("name")
nvmlDeviceGetTemperature = _fact("temperature")
nvmlDeviceGetClockInfo = _fact("clock")
nvmlDeviceGetCurrentClocksEventReasons = _fact("throttle")
nvmlDeviceGetRemappedRows = _fact("rows")
nvmlDeviceGetRetiredPages = _fact("pages")


def nvmlDeviceGetCount() -> int:
    return len(_state()["gpus"])


def nvmlDeviceGetHandleByIndex(index: int) -> str:
    return _state()["gpus"][index]["uuid"]


def nvmlDeviceGetHandleByUUID(uuid: str) -> str:
    return _gpu(uuid)["uuid"]


def nvmlDeviceGetUUID(handle: str) -> str:
    return handle


def nvmlDeviceGetMemoryInfo(handle: str) -> Any:
    used, total = _of(handle, "memory")
    return SimpleNamespace(used=used, total=total, free=total - used)


def nvmlDeviceGetTotalEccErrors(handle: str, _kind: int, counter: int) -> int:
    return _of(handle, "ecc")[counter]


def nvmlDeviceGetUtilizationRates(handle: str) -> Any:
    return SimpleNamespace(gpu=_of(handle, "utilisation"))


def nvmlDeviceGetComputeRunningProcesses(handle: str) -> list[Any]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in _of(handle, "processes")]


def nvmlDeviceGetProcessUtilization(handle: str, _since: int) -> list[Any]:
    working = _of(handle, "working")
    if not working:
        raise NVMLError(_true.NVML_ERROR_NOT_FOUND)
    return [SimpleNamespace(pid=pid, smUtil=90) for pid in working]


def nvmlDeviceGetPciInfo(handle: str) -> Any:
    return SimpleNamespace(domain=0, bus=0x3B + _state()["gpus"].index(_gpu(handle)), device=0)


def nvmlEventSetWait_v2(_events: str, _milliseconds: int) -> Any:
    """Return each Xid of the state once per process. Its entries are `[unique number, UUID, Xid]`."""
    for number, uuid, xid in _state().get("xids", []):
        if number not in _told:
            _told.add(number)
            return SimpleNamespace(device=uuid, eventType=_true.nvmlEventTypeXidCriticalError, eventData=xid)
    raise NVMLError(_true.NVML_ERROR_TIMEOUT)
