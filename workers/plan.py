"""This host's slots, planned from the settings and the GPUs, and the environment of each slot's worker process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Final
from uuid import UUID

from kqueue.config import Config
from kqueue.errors import ConfigError
from workers.judge.gpu.devices import Device
from workers.slot import VARIABLE, Slot

#: Most CPU slots on a host without GPUs, if the settings do not say.
_MOST_CPU_SLOTS: Final = 8


def plan(config: Config, gpus: Sequence[Device], cores: int) -> list[Slot]:
    """Return this host's slots, numbered from 0. Each start of a worker sets its slot's ``worker_id``.

    Raises:
        ConfigError: there would be no slot.
    """
    scratch = config.scratch.absolute()
    slots: list[Slot] = []

    def add(name: str, device: str, lanes: tuple[str, ...], siblings: int) -> None:
        number = len(slots)
        slots.append(
            Slot(
                worker_id=UUID(int=0),
                name=name,
                number=number,
                device=device,
                lanes=lanes,
                siblings=siblings,
                scratch=scratch / name,
                lock=scratch / "locks" / f"{device}.lock",
                uid=config.candidate_uid + number if os.geteuid() == 0 else None,
            )
        )

    for gpu in gpus:
        for i in range(config.slots_per_gpu):
            add(f"gpu{gpu.index}-{i}", gpu.uuid, ("gpu", f"gpu.{gpu.model}"), config.slots_per_gpu)
    cpu_slots = config.cpu_slots
    if cpu_slots is None:
        cpu_slots = 0 if gpus else min(cores, _MOST_CPU_SLOTS)
    for i in range(cpu_slots):
        add(f"cpu-{i}", "cpu", ("cpu",), cpu_slots)
    if not slots:
        raise ConfigError(
            f"nothing to do: KQUEUE_GPUS={config.gpus} finds no GPU and KQUEUE_CPU_SLOTS is 0; set one of them"
        )
    return slots


def environment(slot: Slot, config: Config, cores: int, base: Mapping[str, str]) -> dict[str, str]:
    """Return a worker process's environment: ``base``, the settings, and the slot. Holds secrets."""
    env = dict(base) | config.environment() | {VARIABLE: slot.to_json(), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    if slot.on_gpu:
        env["CUDA_VISIBLE_DEVICES"] = slot.device
        # For judges alone, which use one stream; candidates keep the driver's default. The driver creates contexts one
        # after another, and most of a context's cost is its queues (docs/timing.md#what-contexts-cost).
        env |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_DEVICE_MAX_COPY_CONNECTIONS": "1"}
        env.pop("TRITON_INTERPRET", None)
    else:
        env |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
        threads = str(max(1, cores // slot.siblings))
        env |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    return env
