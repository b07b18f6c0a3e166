"""This host's slots, planned from the settings and the GPUs, and what each gets: an environment, a directory and a uid.

Directories and uids are exclusive among the fleets of the host.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final
from uuid import UUID, uuid4

from kqueue.config import Config
from kqueue.errors import ConfigError
from workers.judge.gpu.devices import Device
from workers.judge.host import linux, scratch, uids
from workers.judge.slot_config import set_environment
from workers.slot import VARIABLE, Slot

#: Default limit on the number of CPU slots of a host without GPUs.
_MOST_CPU_SLOTS: Final = 8
#: Prefix of directories that wait to be removed.
_TRASH: Final = "trash-"


def plan(config: Config, gpus: Sequence[Device], cores: int) -> list[Slot]:
    """Return this host's slots, numbered from 0. Each start of a worker sets its slot's ``worker_id``.

    Raises:
        ConfigError: there would be no slot.
    """
    root = config.scratch.absolute()
    slots: list[Slot] = []

    def add(name: str, device: str, lanes: tuple[str, ...], siblings: int) -> None:
        number = len(slots)
        others = tuple(gpu.uuid for gpu in gpus if gpu.uuid != device) if device != "cpu" else ()
        slots.append(
            Slot(
                worker_id=UUID(int=0),
                name=name,
                number=number,
                device=device,
                lanes=lanes,
                siblings=siblings,
                scratch=root / name,
                lock=scratch.device_lock(root, device),
                uid=config.candidate_uid + number if os.geteuid() == 0 else None,
                build_store=config.build_location,
                build_store_bytes=config.build_store_bytes,
                peers=others,
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


class Scratch:
    """The allocator of slots' private directories and uids. It removes old directories in the background."""

    def __init__(self, root: Path) -> None:
        """Configure the scratch below the setting ``scratch`` without creating anything."""
        self._root = root.absolute()
        #: Descriptors whose locks reserve the fleet's directory and uids.
        self._held: list[int] = []
        self._removals: list[subprocess.Popen[bytes]] = []

    def assign(self, slots: list[Slot]) -> list[Slot]:
        """Create the shared directories, which other users can only traverse. Return the slots with scratch and uid.

        Raises:
            ConfigError: another user owns the directories.
        """
        scratch.prepare(self._root)
        directory, descriptor = scratch.reserve(self._root, "fleet")
        self._held.append(descriptor)
        self._removals += [linux.start_removal(old) for old in directory.glob(_TRASH + "*")]
        assigned: list[Slot] = []
        for slot in slots:
            uid = None
            if slot.uid is not None:
                held = uids.hold(slot.uid)
                self._held.append(held.descriptor)
                uid = held.uid
            assigned.append(replace(slot, scratch=directory / slot.name, uid=uid))
        return assigned

    def renew(self, directory: Path) -> None:
        """Create a slot's empty directory for a new worker. Start removing the old one, without waiting."""
        with contextlib.suppress(FileNotFoundError):
            self._removals.append(linux.start_removal(directory.rename(directory.with_name(_TRASH + uuid4().hex))))
        directory.mkdir(mode=0o711, parents=True)

    def reap(self) -> None:
        """Reap the processes that have finished removing directories."""
        self._removals = [removal for removal in self._removals if removal.poll() is None]

    def pids(self) -> set[int]:
        """Return the processes that remove directories."""
        return {removal.pid for removal in self._removals}

    def release(self) -> None:
        """Release the directory and the uids to other fleets."""
        for descriptor in self._held:
            os.close(descriptor)
        self._held.clear()
