"""The configuration of a slot: a share of a device that judges one evaluation at a time."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self

from kqueue import backends

#: Action if foreign processes use the GPU when a kernel is to be timed: wait until they stop, refuse to time it, or
#: time it and label the result.
Sharing = Literal["wait", "refuse", "label"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotConfig:
    """A slot on a device.

    Attributes:
        name: short name, unique on the host. ``gpu0-1`` is the second slot on the first GPU, ``cpu-0`` the first on the
            CPU.
        number: index among all slots of the host, from 0.
        device: a GPU's UUID, or ``cpu``.
        siblings: number of slots on the same device, including this one.
        scratch: the slot's private directory. Other users can traverse its parent.
        lock: lock file that the device's slots share. It is held while the device is used, exclusively for checks and
            timing.
        uid: the candidates' uid if the judge runs as root, else None. The uids of references and builders are derived
            from it (:mod:`workers.judge.host.uids`).
        gpu_shared: action if foreign processes use the GPU.
        keeps_processes: True to keep processes between evaluations: references of problems, and a prepared candidate.
        build_store: path or URL of the store of builds (:mod:`workers.judge.host.artifacts`). Empty for no store.
        build_store_bytes: maximum size in bytes of all stored builds.
        alone: True to use the device exclusively, because earlier attempts of the evaluation crashed their workers.
        peers: UUIDs of the host's other GPUs, with which a group can use this one.
    """

    name: str
    number: int
    device: str
    siblings: int
    scratch: Path
    lock: Path
    uid: int | None
    gpu_shared: Sharing = "wait"
    keeps_processes: bool = True
    build_store: str = ""
    build_store_bytes: int = 0
    alone: bool = False
    peers: tuple[str, ...] = ()

    @property
    def on_gpu(self) -> bool:
        """True if the slot is on a GPU."""
        return self.device != "cpu"

    def interprets(self, backend: str) -> bool:
        """Return whether kernels of this backend run in Triton's interpreter."""
        return backends.find(backend).triton and not self.on_gpu

    @property
    def ledger(self) -> Path:
        """Directory of the reservations of the GPU's memory (:mod:`workers.judge.gpu.booking`)."""
        return self.lock.with_suffix(".memory")

    def as_json(self) -> dict[str, Any]:
        """Return the JSON form of the fields of this class, without the fields of a subclass."""
        values = asdict(self)
        return {field.name: values[field.name] for field in fields(SlotConfig)} | {
            name: str(values[name]) for name in ("scratch", "lock")
        }

    @classmethod
    def from_json(cls, known: dict[str, Any]) -> Self:
        """Return a slot from the JSON form of its fields."""
        parsed: dict[str, Any] = {name: Path(known[name]) for name in ("scratch", "lock")}
        parsed["peers"] = tuple(known.get("peers", ()))
        return cls(**known | parsed)


def set_environment(environment: MutableMapping[str, str], slot: SlotConfig, cores: int) -> None:
    """Set the variables that torch, Triton and CUDA read in a judge. Call this before torch is imported.

    The slots of a device share the host's ``cores``.
    """
    # Makes torch query NVML instead of CUDA for GPUs. A process that has initialised CUDA cannot fork.
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if slot.on_gpu:
        environment["CUDA_VISIBLE_DEVICES"] = slot.device
        # Only for judges, which use one stream. The driver serialises the creation of contexts, and most of a context's
        # cost is its queues (docs/timing.md#cost-of-cuda-contexts).
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = environment["CUDA_DEVICE_MAX_COPY_CONNECTIONS"] = "1"
        environment.pop("TRITON_INTERPRET", None)
    else:
        environment["CUDA_VISIBLE_DEVICES"] = ""
        environment["TRITON_INTERPRET"] = "1"
    # By default idle OpenMP threads spin, which takes cores from compilers and other judges.
    environment["OMP_WAIT_POLICY"] = "passive"
    environment["OMP_NUM_THREADS"] = environment["MKL_NUM_THREADS"] = str(max(1, cores // slot.siblings))
