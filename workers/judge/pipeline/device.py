"""Tests of an evaluation's GPU before its kernel uses it, and after the kernel is gone. A CPU is not tested."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator

from kqueue.categories import Category
from kqueue.contract import Outcome, Phase
from workers.judge.backend import JudgeBackend
from workers.judge.ending import EvaluationEnded
from workers.judge.pipeline import health
from workers.judge.pipeline.evidence import EvidenceBuilder
from workers.judge.pipeline.steps import Steps
from workers.judge.slot_config import SlotConfig


class Device:
    """The device of one evaluation."""

    def __init__(
        self, slot: SlotConfig, backend: JudgeBackend, steps: Steps, evidence: EvidenceBuilder, *, timed: bool
    ) -> None:
        """Test nothing yet. ``timed`` is True if a kernel will be timed."""
        self._slot = slot
        self._backend = backend
        self._steps = steps
        self._evidence = evidence
        self._is_timed = timed and slot.on_gpu
        self._sharing = health.Sharing(slot.device if self._is_timed else None, slot.gpu_shared)
        self._memory: health.Memory | None = None
        self._passed = False

    def begin(self) -> None:
        """Record the GPU's memory use before the evaluation, to detect leaks."""
        if self._slot.on_gpu:
            self._memory = health.Memory(self._slot.device)

    def test(self, *, final: bool = False) -> None:
        """Run the GPU self-test, which takes milliseconds. ``final`` is True if the kernel is gone."""
        if self._slot.on_gpu:
            self._steps.enter(Phase.SELF_TEST, time.monotonic() + health.SELF_TEST_S)
            with self._steps.timed("canary"):
                self._evidence.canary = health.test()
            self._steps.enter(Phase.PREPARE)
        self._passed |= final

    def check(self, outcome: Outcome) -> Outcome:
        """Test the GPU after foreign code ran on it. Replace the outcome if the GPU is damaged."""
        if not self._slot.on_gpu or outcome.category is Category.GPU_UNHEALTHY:
            return outcome
        leaked = self._evidence.leaked_bytes = self._memory.leak() if self._memory is not None else None
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
        """Wait for foreign processes as :meth:`.health.Sharing.before_timing` does, and record them."""
        with self._recording():
            self._sharing.before_timing()

    def after_timing(self) -> None:
        """Check for foreign processes as :meth:`.health.Sharing.after_timing` does, and record them."""
        with self._recording():
            self._sharing.after_timing()

    @contextlib.contextmanager
    def _recording(self) -> Generator[None]:
        try:
            yield
        finally:
            if self._is_timed:
                strangers = self._sharing.strangers
                self._evidence.strangers = "unknown" if strangers is None else strangers
