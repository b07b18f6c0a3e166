"""A place: where one evaluation at a time is judged, and what it may use there."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self

#: What is done about processes of others that compute on the GPU while a kernel is to be timed: wait for them to stop,
#: refuse to time it, or time it and say so.
Sharing = Literal["wait", "refuse", "label"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotConfig:
    """A place on a device.

    Attributes:
        name: short and unique on the host: ``gpu0-1`` is the second place on the first GPU, ``cpu-0`` the first on the
            CPU.
        number: counts all places of the host from 0.
        device: a GPU's UUID, or ``cpu``.
        siblings: places on the same device, this one included.
        scratch: a directory of this place's own; others may traverse its parent.
        lock: held while the device is used, alone for checks and timing; the device's places share it.
        uid: the candidates' uid where the judge runs as root, else None. A reference's and a builder's follow from it
            (:mod:`workers.judge.host.uids`).
        gpu_shared: what is done about strangers at work on the GPU.
        keeps_processes: True to keep processes between evaluations: references of problems, and a candidate that is
            made ahead.
        build_store: where builds are kept, a path or a URL (:mod:`workers.judge.host.artifacts`); empty for nowhere.
        build_store_bytes: the most that they may take there together.
        alone: True while nothing else uses the device, as earlier tries of the evaluation took their workers with them.
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

    @property
    def on_gpu(self) -> bool:
        """True if the place is on a GPU."""
        return self.device != "cpu"

    @property
    def ledger(self) -> Path:
        """The folder in which the memory of the place's GPU is booked (:mod:`workers.judge.gpu.booking`)."""
        return self.lock.with_suffix(".memory")

    def as_json(self) -> dict[str, Any]:
        """Return what :meth:`from_json` takes; of more than a place, what makes it one."""
        known = asdict(self)
        return {field.name: known[field.name] for field in fields(SlotConfig)} | {
            name: str(known[name]) for name in ("scratch", "lock")
        }

    @classmethod
    def from_json(cls, known: dict[str, Any]) -> Self:
        """Return a place from the JSON form of its fields."""
        paths: dict[str, Any] = {name: Path(known[name]) for name in ("scratch", "lock")}
        return cls(**known | paths)


def set_environment(environment: MutableMapping[str, str], slot: SlotConfig, cores: int) -> None:
    """Set the variables that torch, Triton and CUDA read in a judge. They must be set before torch is imported.

    Args:
        environment: the variables to change.
        slot: where the judge judges.
        cores: the host's cores, which the places of a device share.
    """
    # torch then asks NVML and not CUDA for GPUs. A process that touched CUDA cannot fork.
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if slot.on_gpu:
        environment["CUDA_VISIBLE_DEVICES"] = slot.device
        # For judges alone, which use one stream. The driver creates contexts one after another, and most of a context's
        # cost is its queues (docs/timing.md#cost-of-cuda-contexts).
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = environment["CUDA_DEVICE_MAX_COPY_CONNECTIONS"] = "1"
        environment.pop("TRITON_INTERPRET", None)
    else:
        environment["CUDA_VISIBLE_DEVICES"] = ""
        environment["TRITON_INTERPRET"] = "1"
    # Threads that wait for the next piece of work would spin, and take the cores from compilers and from other judges.
    environment["OMP_WAIT_POLICY"] = "passive"
    environment["OMP_NUM_THREADS"] = environment["MKL_NUM_THREADS"] = str(max(1, cores // slot.siblings))
