"""Fake GPUs, with doubles only for NVML and the GPU self-test."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final

from kqueue.store import gpus
from tests.fleet import told
from tests.waiting import until

GIB: Final = 1 << 30
_DOUBLES: Final = Path(__file__).parent / "doubles"


class Gpus:
    """The changeable state that the doubles report: NVML's facts and the results of GPU self-tests."""

    def __init__(self, directory: Path, count: int = 1) -> None:
        self.directory = directory
        shutil.copytree(_DOUBLES, directory, dirs_exist_ok=True)
        self.uuids = [f"GPU-{number:08}-0000-0000-0000-000000000000" for number in range(count)]
        self.state: dict[str, Any] = {"self_test": "pass", "xids": [], "gpus": [_fresh(uuid) for uuid in self.uuids]}
        self.write()

    def write(self) -> None:
        fresh = self.directory / "state.new"
        fresh.write_text(json.dumps(self.state))
        fresh.replace(self.directory / "state.json")

    def say(self, number: int = 0, **facts: Any) -> None:
        self.state["gpus"][number] |= facts
        self.write()

    def ends(self, how: str) -> None:
        """Make GPU self-tests end as `pass`, `fail`, `unknown` or `hang`."""
        self.state["self_test"] = how
        self.write()

    def xid(self, xid: int, number: int = 0) -> None:
        self.state["xids"].append([len(self.state["xids"]), self.uuids[number], xid])
        self.write()

    def tests(self) -> list[str]:
        log = self.directory / "tests.log"
        return log.read_text().split() if log.exists() else []


def _fresh(uuid: str) -> dict[str, Any]:
    return {
        "uuid": uuid, "name": "NVIDIA H200", "memory": [GIB, 140 * GIB], "temperature": 35, "clock": 1980,
        "throttle": 0, "ecc": [0, 2], "rows": [0, 0, 0, 0], "utilisation": 0, "processes": [], "working": [],
    }  # fmt: skip


class Watcher:
    """Reads the states of a fleet's GPUs and workers from the database."""

    def __init__(self, services: told.Services, fake: Gpus) -> None:
        self._services = services
        self._fake = fake

    def gpu(self, number: int = 0) -> gpus.GpuStatus:
        [known] = gpus.find(self._services.engine, uuids=[self._fake.uuids[number]])
        return known

    def paused(self, fleet: told.Fleet, number: int = 0) -> str | None:
        """Return the reason why the GPU's worker is paused, or None."""
        return next(w.paused for w in fleet.live() if w.device == self._fake.uuids[number])

    def until_state(self, state: str, number: int = 0, timeout_s: float = 60) -> gpus.GpuStatus:

        def there() -> gpus.GpuStatus | None:
            known = self.gpu(number)
            return known if known.state == state and (state != "serving" or known.paused is None) else None

        return until(there, timeout_s, f"a GPU that is {state}")
