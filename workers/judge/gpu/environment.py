"""The environment of a measurement. Nothing here uses CUDA, so a process that forks later can use this module."""

from __future__ import annotations

import contextlib
import platform
from pathlib import Path
from typing import Any, Self

import torch

from kqueue.backends import installed
from workers.judge.gpu.devices import opened
from workers.judge.slot_config import SlotConfig


def facts(slot: SlotConfig) -> dict[str, Any]:
    """Return the slot's device, driver and software in the form of a row of the table ``environments``."""
    device: dict[str, Any] = _gpu(slot.device) if slot.on_gpu else {"device": _cpu(), "driver": None}
    return device | {
        "cuda": torch.version.cuda if slot.on_gpu else None,
        "torch": torch.__version__,
        "triton": installed("triton"),
        "python": platform.python_version(),
        "host": platform.node(),
        "os": f"{platform.system()} {platform.release()}",
        "kqueue": installed("kqueue"),
    }


class Watch:
    """Watches a GPU's clocks while calls are timed on it. On a CPU it reports nothing."""

    #: NVML's reasons for throttling that protect the hardware: heat, power supply, an external brake.
    _PROTECTS = ("HwSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown", "SwThermalSlowdown")
    #: Share of the highest SM clock seen, below which the GPU counts as throttled.
    _SLOW = 0.9

    def __init__(self, slot: SlotConfig) -> None:
        self._slot = slot
        self._nvml = contextlib.ExitStack()
        self._handle: Any = None
        self._fastest = 0.0
        self._reasons = 0
        self._slow = 0

    def __enter__(self) -> Self:
        if self._slot.on_gpu:
            import pynvml

            self._handle = self._nvml.enter_context(opened(self._slot.device))
            for name in self._PROTECTS:
                self._slow |= getattr(pynvml, f"nvmlClocksEventReason{name}")
        return self

    def __exit__(self, *_: object) -> None:
        self._nvml.close()

    def throttled(self) -> bool:
        """Return whether the SM clock dropped during this watch, or the driver reports throttling."""
        if self._handle is None:
            return False
        mhz, reasons = self._ask("sm_mhz"), self._ask("reasons")
        self._fastest = max(self._fastest, mhz or 0.0)
        self._reasons |= int(reasons or 0)
        return bool(int(reasons or 0) & self._slow) or (mhz is not None and mhz < self._SLOW * self._fastest)

    def clocks(self) -> dict[str, float | str | None]:
        """Return the current SM and memory clocks in MHz, and all throttle reasons seen so far."""
        if self._handle is None:
            return {}
        self.throttled()
        return {
            "sm_mhz": self._ask("sm_mhz"),
            "memory_mhz": self._ask("memory_mhz"),
            "throttle_reasons": hex(self._reasons),
        }

    def _ask(self, quantity: str) -> float | None:
        import pynvml

        try:
            if quantity == "reasons":
                return pynvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle)
            clock = pynvml.NVML_CLOCK_SM if quantity == "sm_mhz" else pynvml.NVML_CLOCK_MEM
            return float(pynvml.nvmlDeviceGetClockInfo(self._handle, clock))
        except pynvml.NVMLError:
            return None


def _gpu(uuid: str) -> dict[str, Any]:
    import pynvml

    with opened(uuid) as handle:
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
