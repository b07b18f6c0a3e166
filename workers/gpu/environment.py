"""What a number was taken on. Nothing here touches CUDA, so that a parent that forks may ask."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import torch

from workers.slot import Slot


def facts(slot: Slot) -> dict[str, Any]:
    """The slot's device, driver and software, as the table ``environments`` holds them."""
    device: dict[str, Any] = _gpu(slot.device) if slot.on_gpu else {"device": _cpu(), "driver": None}
    return device | {
        "cuda": torch.version.cuda if slot.on_gpu else None,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "host": platform.node(),
        "os": f"{platform.system()} {platform.release()}",
    }


def clocks(slot: Slot) -> dict[str, float | str | None]:
    """SM and memory clock in MHz and the reasons for throttling, as NVML tells them now."""
    if not slot.on_gpu:
        return {}
    import pynvml

    found: dict[str, float | str | None] = {}
    with _nvml(slot.device) as handle:
        for name, ask in {
            "sm_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "memory_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM),
            "throttle_reasons": lambda: hex(pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)),
        }.items():
            try:
                found[name] = ask()
            except pynvml.NVMLError:
                found[name] = None
    return found


@contextlib.contextmanager
def _nvml(uuid: str) -> Any:
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml.nvmlDeviceGetHandleByUUID(uuid)
    finally:
        pynvml.nvmlShutdown()


def _gpu(uuid: str) -> dict[str, Any]:
    import pynvml

    with _nvml(uuid) as handle:
        return {
            "device": str(pynvml.nvmlDeviceGetName(handle)),
            "driver": str(pynvml.nvmlSystemGetDriverVersion()),
            "memory_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
        }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
