"""Functions that wait for conditions and inspect processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def until(look: Callable[[], Any], timeout_s: float = 60.0, what: str = "it") -> Any:
    """Poll until ``look`` returns a true value, and return it."""
    deadline = time.monotonic() + timeout_s
    while not (seen := look()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come within {timeout_s} s")
        time.sleep(0.02)
    return seen


def waits(pid: int) -> bool:
    """Return whether a process is a prewarmed candidate without a kernel."""
    try:
        named = Path(f"/proc/{pid}/comm").read_text() == "kq-candidate\n"
        return named and not Path(f"/proc/{pid}/cwd/kernel.py").exists()
    except OSError:
        return False


def alive(pid: int) -> bool:
    """Return whether a process runs. Zombies do not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
