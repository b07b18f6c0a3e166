"""Pause intake while the host is short of memory or disk space.

Below a configured share of free memory or disk space, workers take no evaluations, and running ones continue. Intake
resumes at 1.5 times that share, so that a host at the limit does not flap.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import structlog

from kqueue.config import Config
from workers.judge.sandbox import cgroups

_log: Any = structlog.get_logger(__name__)

#: Multiple of the configured share that must be free before intake resumes.
_HYSTERESIS: Final = 1.5
_GIB: Final = 1 << 30


class Pressure:
    """The state of one host. :attr:`reason` names the shortage, or is None."""

    def __init__(self, config: Config) -> None:
        self.reason: str | None = None
        self._memory = config.min_free_memory
        self._disk = config.min_free_disk
        self._folders = (config.scratch.absolute(), config.home_path)

    def look(self) -> None:
        """Check the host, and log a change."""
        factor = 1.0 if self.reason is None else _HYSTERESIS
        short = _short_memory(self._memory * factor) or _short_disk(self._folders, self._disk * factor)
        if short and self.reason is None:
            _log.error("no evaluations are taken", reason=short)
            self.reason = short
        elif self.reason is not None and not short:
            _log.info("evaluations are taken again", was=self.reason)
            self.reason = None


def _short_memory(least: float) -> str | None:
    for whose, (free, total) in {"the host's": _host_memory(), "the fleet's group's": cgroups.memory()}.items():
        if total and free < least * total:
            return f"less than {least:.1%} of {whose} {total / _GIB:.1f} GiB of memory is free"
    return None


def _short_disk(folders: tuple[Path, ...], least: float) -> str | None:
    for folder in folders:
        there = next(part for part in (folder, *folder.parents) if part.exists())
        try:
            disk = os.statvfs(there)
        except OSError:
            continue
        if disk.f_bavail < least * disk.f_blocks:
            size = disk.f_blocks * disk.f_frsize / _GIB
            return f"less than {least:.1%} of the {size:.1f} GiB of the disk of {folder} is free"
        # File systems without a fixed number of inodes report 0.
        if disk.f_favail < least * disk.f_files:
            return f"less than {least:.1%} of the {disk.f_files} inodes of the disk of {folder} are free"
    return None


def _host_memory() -> tuple[int, int]:
    """Return the bytes of memory available without swapping, and the total."""
    memory = dict.fromkeys(("MemAvailable", "MemTotal"), 0)
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in memory:
            memory[name] = int(rest.split()[0]) << 10
    return memory["MemAvailable"], memory["MemTotal"]
