"""The host's GPUs, as the driver's management library (NVML) tells. Never touches CUDA."""

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
        index: NVML's number, by PCI bus; CUDA may count otherwise, which is why workers are given the UUID.
        uuid: ``GPU-...``, the value for ``CUDA_VISIBLE_DEVICES``.
        name: the vendor's name, such as ``NVIDIA H200``.
        memory_bytes: the GPU's whole memory.
    """

    index: int
    uuid: str
    name: str
    memory_bytes: int

    @property
    def model(self) -> str:
        """The last part of the lane ``gpu.<model>``: ``h200``, ``a100``, ``rtx4090``."""
        return gpu_model(self.name)


def devices() -> list[Device]:
    """All GPUs of the host by index; empty where there is no driver or no library for it."""
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
    """NVML's handle on a GPU.

    Raises:
        pynvml.NVMLError: there is no such GPU, or it is lost.
    """
    import pynvml

    nvml: Any = pynvml
    nvml.nvmlInit()
    try:
        yield nvml.nvmlDeviceGetHandleByUUID(uuid)
    finally:
        nvml.nvmlShutdown()


def choose(wanted: str, found: Sequence[Device], visible: str | None = None) -> list[Device]:
    """The GPUs that the setting ``KQUEUE_GPUS`` means.

    Args:
        wanted: ``all``, ``none``, or indices and UUIDs separated by commas.
        found: what :func:`devices` found.
        visible: the value of ``CUDA_VISIBLE_DEVICES`` in the fleet's own environment, if it is set: ``all``
            then means these only, as on a shared host the others belong to somebody else.

    Raises:
        ConfigError: a GPU that was asked for is not there.
    """
    if wanted == "none":
        return []
    if wanted == "all":
        return list(found) if visible is None else [d for d in found if _named(d, _parts(visible))]
    chosen = [next((d for d in found if _named(d, [part])), None) for part in _parts(wanted)]
    missing = [part for part, device in zip(_parts(wanted), chosen, strict=True) if device is None]
    if missing or not chosen:
        have = ", ".join(f"{d.index} ({d.uuid}, {d.name})" for d in found) or "no GPU (is the NVIDIA driver loaded?)"
        raise ConfigError(f"KQUEUE_GPUS={wanted}: no GPU {', '.join(missing) or 'named'}; this host has {have}")
    return list({d.uuid: d for d in chosen if d is not None}.values())


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _named(device: Device, parts: Sequence[str]) -> bool:
    # CUDA accepts the beginning of a UUID as well.
    return any(p == str(device.index) or (p.startswith("GPU-") and device.uuid.startswith(p)) for p in parts)
