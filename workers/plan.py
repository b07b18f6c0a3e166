"""This host's slots, planned from the settings and the GPUs, and the environment of each slot's worker process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Final
from uuid import UUID

from kqueue.config import Config
from kqueue.errors import ConfigError
from workers.judge.gpu.devices import Device
from workers.judge.host.scratch import device_lock
from workers.judge.slot_config import set_environment
from workers.slot import VARIABLE, Slot

#: Default limit on the number of CPU slots of a host without GPUs.
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
                lock=device_lock(scratch, device),
                uid=config.candidate_uid + number if os.geteuid() == 0 else None,
                build_store=config.build_location,
                build_store_bytes=config.build_store_bytes,
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
            f"nothing to do: KQUEUE_GPUS={config.gpus} finds no GPU and KQUEUE_CPU_SLOTS is 0. Set one of them"
        )
    return slots


def environment(slot: Slot, config: Config, cores: int, base: Mapping[str, str]) -> dict[str, str]:
    """Return a worker process's environment, secrets included: ``base``, the settings, and the slot.

    OpenTelemetry's settings are left out, because a worker does not need them and they include a collector's
    credentials.
    """
    env = (
        {name: value for name, value in base.items() if not name.startswith("OTEL_")}
        | config.environment()
        | {VARIABLE: slot.to_json()}
    )
    set_environment(env, slot, cores)
    return env
