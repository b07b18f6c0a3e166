"""Checks of the GPU before a kernel is timed on it, and after the kernel is gone.

The judge runs them in its own process and context. If one fails, the supervisor tests the GPU again in a fresh process
(:mod:`workers.monitor`).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator
from typing import Any, Final, Literal

import pynvml as _pynvml
import torch

from kqueue.categories import Category
from kqueue.contract import Outcome, Phase
from kqueue.evidence import ForeignGpuProcess
from workers.judge.backend import JudgeBackend
from workers.judge.ending import EvaluationEnded
from workers.judge.gpu import facts, self_test
from workers.judge.gpu.devices import opened
from workers.judge.host import linux
from workers.judge.pipeline.evidence import Observed
from workers.judge.pipeline.steps import Steps
from workers.judge.slot_config import SlotConfig

_nvml: Any = _pynvml

#: Deadline in seconds of a test. The judge supervisor ends a judge that exceeds it.
SELF_TEST_S: Final = 20.0
#: Time in seconds covered by the first query to NVML about other processes' activity.
_SAMPLES_S: Final = 2.0


def test() -> str:
    """Test in this process that the GPU computes known answers, and return the result as text.

    Raises:
        EvaluationEnded: ``gpu_unhealthy``.
    """
    begun = time.monotonic()
    try:
        self_test.chains("cuda")
    except torch.OutOfMemoryError:
        return "no memory was free"
    except (torch.AcceleratorError, self_test.SelfTestError) as error:
        message = f"the GPU failed its test: {error}"
        raise EvaluationEnded(
            Category.GPU_UNHEALTHY, message, Phase.SELF_TEST, cuda_code=getattr(error, "error_code", None)
        ) from None
    return f"right in {1000 * (time.monotonic() - begun):.1f} ms"


class Memory:
    """Detects GPU memory that has leaked since this object was created."""

    def __init__(self, uuid: str, *, stays_s: float = self_test.LEAK_S) -> None:
        """Record the GPU's memory use. Memory counts as leaked if it remains for ``stays_s`` seconds."""
        self._uuid = uuid
        self._stays_s = stays_s
        self.before: int | None = None
        with _asking(), opened(uuid) as handle:
            self.before = facts.unaccounted_bytes(handle)

    def leak(self) -> int | None:
        """Return the number of leaked bytes, or None if it is unknown."""
        if self.before is None:
            return None
        with _asking():
            return self_test.leak(self._uuid, self.before, stays_s=self._stays_s)
        return None


def held_bytes(uuid: str) -> int | None:
    """Return the GPU memory of all processes of this judge's slot in bytes, or None if NVML does not report it."""
    family = _family()
    with _asking(), opened(uuid) as handle:
        processes = facts.processes(handle)
        if processes is None or not facts.sees_all():
            return None
        own = [process.memory_bytes for process in processes if linux.descends(process.pid, family)]
        return sum(nbytes for nbytes in own if nbytes is not None) if own else None
    return None


class Sharing:
    """Detects foreign processes on the GPU, which do not descend from this host's supervisor."""

    def __init__(
        self,
        uuid: str | None,
        policy: Literal["wait", "refuse", "label"],
        *,
        fleet: int | None = None,
        wait_s: float = 60.0,
        look_s: float = 1.0,
    ) -> None:
        """Configure the detection. The policy is the reaction to active processes. See ``Config.gpu_shared``.

        ``fleet`` is the supervisor's process, or None for the parent of this judge's supervisor.
        """
        self._uuid = uuid
        self._policy = policy
        self._wait_s, self._look_s = wait_s, look_s
        self._seen: dict[int, ForeignGpuProcess] = {}
        self._is_complete = True
        self._looked_at = time.time() - _SAMPLES_S
        self._fleet = linux.parent(_family() or 0) if fleet is None else fleet

    @property
    def foreign_processes(self) -> tuple[ForeignGpuProcess, ...] | None:
        """Foreign processes seen so far, or None if they cannot be distinguished from the fleet's own processes."""
        return tuple(self._seen.values()) if self._is_complete else None

    def before_timing(self) -> None:
        """Wait until no foreign process computes on the GPU, if the policy requires that.

        Raises:
            EvaluationEnded: ``timing_unstable`` if a foreign process still computes.
        """
        deadline = time.monotonic() + (self._wait_s if self._policy == "wait" else 0)
        while self._look() and self._policy != "label":
            if time.monotonic() >= deadline:
                raise self._shared("before the kernel could be timed")
            time.sleep(self._look_s)

    def after_timing(self) -> None:
        """Check that no foreign process computed during the timing. Raise like :meth:`before_timing`."""
        if self._look() and self._policy != "label":
            raise self._shared("while the kernel was timed")

    def _shared(self, when: str) -> EvaluationEnded:
        busy = ", ".join(f"{one.name or 'unknown'} ({one.pid})" for one in self._seen.values() if one.active)
        return EvaluationEnded(
            Category.TIMING_UNSTABLE,
            f"other processes computed on the GPU {when}: {busy}",
            Phase.TIME,
            foreign_processes=self.foreign_processes,
        )

    def _look(self) -> bool:
        """Return whether a foreign process has computed since the last query."""
        if self._uuid is None:
            return False
        with _asking(), opened(self._uuid) as handle:
            processes = facts.processes(handle)
            if processes is None or not facts.sees_all():
                self._is_complete = False
                return False
            foreign = [p for p in processes if not linux.descends(p.pid, self._fleet)]
            active = self._active(handle) if foreign else set[int]()
            for process in foreign:
                working = None if active is None else process.pid in active
                before = self._seen[process.pid].active if process.pid in self._seen else None
                self._seen[process.pid] = ForeignGpuProcess(
                    pid=process.pid,
                    name=process.name,
                    memory_bytes=process.memory_bytes,
                    active=before if before or working is None else working,
                )
            return any(process.pid in (active or ()) for process in foreign)
        return False

    def _active(self, handle: Any) -> set[int] | None:
        """Return the processes that computed since the last query, or None if NVML does not report them."""
        since, self._looked_at = self._looked_at, time.time()
        try:
            samples = _nvml.nvmlDeviceGetProcessUtilization(handle, int(since * 1e6))
        except _nvml.NVMLError as error:
            return set() if error.value == _nvml.NVML_ERROR_NOT_FOUND else None
        return {int(sample.pid) for sample in samples if sample.smUtil > 0}


class Device:
    """The GPU of one evaluation, before its kernel uses it and after the kernel is gone. A CPU is not tested.

    Attributes:
        evidence: the evidence of the present shape.
    """

    def __init__(
        self, slot: SlotConfig, backend: JudgeBackend, steps: Steps, evidence: Observed, *, timed: bool
    ) -> None:
        """Test nothing yet. ``timed`` is True if a kernel will be timed."""
        self._slot = slot
        self._backend = backend
        self._steps = steps
        self.evidence = evidence
        self._is_timed = timed and slot.on_gpu
        self._sharing = Sharing(slot.device if self._is_timed else None, slot.gpu_shared)
        self._memory: Memory | None = None
        self._passed = False
        #: Number of GPUs that the evaluation uses.
        self.count = 1

    def begin(self) -> None:
        """Record the GPU's memory use before the evaluation, to detect leaks."""
        if self._slot.on_gpu:
            self._memory = Memory(self._slot.device)

    def test(self, *, final: bool = False) -> None:
        """Run the GPU self-test, which takes milliseconds. ``final`` is True if the kernel is gone."""
        if self._slot.on_gpu:
            self._steps.enter(Phase.SELF_TEST, time.monotonic() + SELF_TEST_S)
            with self._steps.timed("self_test"):
                for number in reversed(range(self.count)):
                    try:
                        with torch.cuda.device(number):
                            self.evidence.self_test = test()
                    except EvaluationEnded as ended:
                        if number:
                            self._backend.doubt(self._slot.peers[number - 1], ended.outcome.message)
                        raise
            self._steps.enter(Phase.PREPARE)
        self._passed |= final

    def check(self, outcome: Outcome) -> Outcome:
        """Test the GPU after foreign code ran on it. Replace the outcome if the GPU is damaged."""
        if not self._slot.on_gpu or outcome.category is Category.GPU_UNHEALTHY:
            return outcome
        leaked = self.evidence.leaked_bytes = self._memory.leak() if self._memory is not None else None
        if leaked:
            self.doubt(f"{leaked} bytes of its memory belong to no process after an evaluation")
        if self._passed:
            return outcome
        try:
            self.test()
        except EvaluationEnded as ended:
            failed = ended.outcome
            return failed.model_copy(update={"facts": failed.facts.model_copy(update={"instead_of": outcome.category})})
        return outcome

    def doubt(self, reason: str) -> None:
        """Report that the GPU is suspect."""
        self._backend.doubt(self._slot.device, reason)

    def before_timing(self) -> None:
        """Wait for foreign processes as :meth:`.Sharing.before_timing` does, and record them."""
        with self._recording():
            self._sharing.before_timing()

    def after_timing(self) -> None:
        """Check for foreign processes as :meth:`.Sharing.after_timing` does, and record them."""
        with self._recording():
            self._sharing.after_timing()

    @contextlib.contextmanager
    def _recording(self) -> Generator[None]:
        try:
            yield
        finally:
            if self._is_timed:
                foreign_processes = self._sharing.foreign_processes
                self.evidence.foreign_processes = "unknown" if foreign_processes is None else foreign_processes


def _family() -> int | None:
    """Return the judge supervisor's process, from which this judge and its fork server descend."""
    return linux.parent(os.getppid())


@contextlib.contextmanager
def _asking() -> Any:
    """Ignore queries that NVML refuses."""
    with contextlib.suppress(_nvml.NVMLError):
        yield
