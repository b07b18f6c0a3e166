"""Whether the GPU is fit: before a kernel is timed on it, and when the kernel is gone.

The judge asks in its own process and its own context. What it finds wrong the supervisor tries again in a fresh
process (:mod:`workers.monitor`).
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any, Final, Literal

import pynvml as _pynvml
import torch

from kqueue.categories import Category
from kqueue.contract import Phase
from workers.judge.ending import EvaluationEnded
from workers.judge.gpu import canary, facts
from workers.judge.gpu.devices import opened
from workers.judge.host import linux

_nvml: Any = _pynvml

#: How long a test may take, in seconds; the worker's parent ends a judge that overruns it.
CANARY_S: Final = 20.0
#: How long a stranger's work is waited for, and between looks.
_WAIT_S: Final = 60.0
_LOOK_S: Final = 1.0
#: How far back at first NVML is asked what processes did.
_SAMPLES_S: Final = 2.0


def test() -> str:
    """Have the GPU compute what is known, in this process. Returns how that went.

    Raises:
        EvaluationEnded: ``gpu_unhealthy``.
    """
    begun = time.monotonic()
    try:
        canary.chains("cuda")
    except torch.OutOfMemoryError:
        return "no memory was free"
    except (torch.AcceleratorError, canary.CanaryError) as error:
        message = f"the GPU failed its test: {error}"
        raise EvaluationEnded(
            Category.GPU_UNHEALTHY, message, Phase.CANARY, cuda_code=getattr(error, "error_code", None)
        ) from None
    return f"right in {1000 * (time.monotonic() - begun):.1f} ms"


class Memory:
    """A GPU's memory that belongs to no living process, now and later."""

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self.before: int | None = None
        with _asking(), opened(uuid) as handle:
            self.before = facts.unaccounted_bytes(handle)

    def leak(self) -> int | None:
        """Bytes that nobody has given back since; None where that cannot be known."""
        if self.before is None:
            return None
        with _asking():
            return canary.leak(self._uuid, self.before)
        return None


class Sharing:
    """Who else computes on the GPU: processes that are not below this host's supervisor.

    ``strangers`` tells of each that was seen: pid, name, bytes of the GPU's memory, and whether it was seen at work
    (None where NVML does not tell). It is None where they cannot be told from the fleet's own.
    """

    def __init__(self, uuid: str | None, policy: Literal["wait", "refuse", "label"]) -> None:
        """Name the GPU, None where nothing is timed on one, and what is done about strangers at work."""
        self._uuid = uuid
        self._policy = policy
        self._seen: dict[int, dict[str, Any]] = {}
        self._known = True
        self._looked_at = time.time() - _SAMPLES_S
        # The judge is the worker's child, and that the supervisor's.
        self._fleet = linux.parent(os.getppid())

    @property
    def strangers(self) -> list[dict[str, Any]] | None:
        return list(self._seen.values()) if self._known else None

    def before_timing(self) -> None:
        """Return when no stranger computes on the GPU, or when that does not matter.

        Raises:
            EvaluationEnded: ``timing_unstable``.
        """
        deadline = time.monotonic() + (_WAIT_S if self._policy == "wait" else 0)
        while self._look() and self._policy != "label":
            if time.monotonic() >= deadline:
                raise self._shared("before the kernel could be timed")
            time.sleep(_LOOK_S)

    def after_timing(self) -> None:
        """Look whether a stranger has begun meanwhile; raises as above."""
        if self._look() and self._policy != "label":
            raise self._shared("while the kernel was timed")

    def _shared(self, when: str) -> EvaluationEnded:
        busy = ", ".join(f"{s['name'] or 'unknown'} ({s['pid']})" for s in self._seen.values() if s["active"])
        return EvaluationEnded(
            Category.TIMING_UNSTABLE, f"others computed on the GPU {when}: {busy}", Phase.TIME, strangers=self.strangers
        )

    def _look(self) -> bool:
        """Whether a stranger is at work, or was since the last look."""
        if self._uuid is None:
            return False
        with _asking(), opened(self._uuid) as handle:
            found = facts.processes(handle)
            if found is None or not facts.sees_all():
                self._known = False
                return False
            strangers = [p for p in found if not linux.descends(p.pid, self._fleet)]
            active = self._active(handle) if strangers else set[int]()
            for stranger in strangers:
                working = None if active is None else stranger.pid in active
                before = self._seen.get(stranger.pid, {}).get("active")
                self._seen[stranger.pid] = {
                    "pid": stranger.pid,
                    "name": stranger.name,
                    "memory_bytes": stranger.memory_bytes,
                    "active": before if before or working is None else working,
                }
            return any(stranger.pid in (active or ()) for stranger in strangers)
        return False

    def _active(self, handle: Any) -> set[int] | None:
        """The processes that were at work since the last look; None where NVML does not tell."""
        since, self._looked_at = self._looked_at, time.time()
        try:
            samples = _nvml.nvmlDeviceGetProcessUtilization(handle, int(since * 1e6))
        except _nvml.NVMLError as error:
            return set() if error.value == _nvml.NVML_ERROR_NOT_FOUND else None
        return {int(sample.pid) for sample in samples if sample.smUtil > 0}


@contextlib.contextmanager
def _asking() -> Any:
    """What NVML cannot be asked is not known."""
    with contextlib.suppress(_nvml.NVMLError):
        yield
