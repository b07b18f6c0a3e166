"""The host's GPUs, read from the driver's management library (NVML). This module never uses CUDA."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from kqueue.contract import gpu_model
from kqueue.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU.

    Attributes:
        index: NVML's index, in order of PCI bus. CUDA can count in another order, so workers get the UUID.
        uuid: ``GPU-...``, the value for ``CUDA_VISIBLE_DEVICES``.
        name: vendor's name, such as ``NVIDIA H200``.
    """

    index: int
    uuid: str
    name: str
    memory_bytes: int

    @property
    def model(self) -> str:
        """Return the last part of the lane ``gpu.<model>``: ``h200``, ``a100``, ``rtx4090``."""
        return gpu_model(self.name)


def devices() -> list[Device]:
    """Return the host's GPUs by index, or an empty list if the driver or NVML's bindings are missing."""
    try:
        import pynvml
    except ImportError:
        return []
    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        return [
            Device(i, nvml.nvmlDeviceGetUUID(h), nvml.nvmlDeviceGetName(h), nvml.nvmlDeviceGetMemoryInfo(h).total)
            for i, h in enumerate(handles)
        ]
    finally:
        nvml.nvmlShutdown()


@contextlib.contextmanager
def opened(uuid: str) -> Generator[Any]:
    """Open NVML and yield its handle for a GPU. Raise pynvml.NVMLError if the GPU does not exist or is lost."""
    import pynvml

    nvml: Any = pynvml
    nvml.nvmlInit()
    try:
        yield nvml.nvmlDeviceGetHandleByUUID(uuid)
    finally:
        nvml.nvmlShutdown()


def choose(
    wanted: str, found: Sequence[Device], visible: str | None = None, *, setting: str = "KQUEUE_GPUS"
) -> list[Device]:
    """Return the GPUs that a setting selects.

    Args:
        wanted: ``all``, ``none``, or indices and UUIDs separated by commas.
        visible: the fleet's own ``CUDA_VISIBLE_DEVICES``, or None. It limits ``all``, because other users can own
            the rest of a shared host's GPUs.
        setting: name of the setting, for messages.
    """
    if wanted == "none":
        return []
    if wanted == "all":
        return list(found) if visible is None else [d for d in found if _named(d, _parts(visible))]
    chosen = [next((d for d in found if _named(d, [part])), None) for part in _parts(wanted)]
    missing = [part for part, device in zip(_parts(wanted), chosen, strict=True) if device is None]
    if missing or not chosen:
        have = ", ".join(f"{d.index} ({d.uuid}, {d.name})" for d in found) or "no GPU (is the NVIDIA driver loaded?)"
        raise ConfigError(f"{setting}={wanted}: no GPU {', '.join(missing) or 'named'}. This host has {have}")
    return list({d.uuid: d for d in chosen if d is not None}.values())


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _named(device: Device, parts: Sequence[str]) -> bool:
    # Like CUDA, accept a prefix of a UUID.
    return any(p == str(device.index) or (p.startswith("GPU-") and device.uuid.startswith(p)) for p in parts)
