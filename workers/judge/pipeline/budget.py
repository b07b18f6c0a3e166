"""GPU memory that is booked for the processes of one evaluation."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Final

import torch

from kqueue.backends import PYTEST
from kqueue.categories import Category
from kqueue.contract import Phase, Request
from kqueue.limits import GPU_WAIT_S
from workers.judge.ending import EvaluationEnded
from workers.judge.gpu import booking
from workers.judge.host import linux
from workers.judge.pipeline import health, plan
from workers.judge.pipeline.evidence import Observed
from workers.judge.pipeline.processes import Processes
from workers.judge.pipeline.steps import Steps
from workers.judge.slot_config import SlotConfig

#: Minimum size in bytes of inputs and outputs for the evaluation's real memory use to be recorded.
_MUCH_BYTES: Final = 256 << 20
#: Host memory in bytes of a CPU's slot from which the plan decides whether large calls are timed in turn.
_HOST_BYTES: Final = 1 << 30


class Budget:
    """Booked GPU memory. On a CPU nothing is booked.

    Attributes:
        plan: the current plan, with nothing for the judge and the kernel at first.
    """

    def __init__(
        self, request: Request, slot: SlotConfig, processes: Processes, steps: Steps, evidence: Observed
    ) -> None:
        """Book nothing yet."""
        self.plan = plan.of_first_draw(whole=0, siblings=1, alone=False)
        self._is_tests = request.backend == PYTEST
        self._slot = slot
        self._processes = processes
        self._steps = steps
        self._evidence = evidence
        self._booking: booking.Booking | None = None
        #: Allowance in bytes of a candidate that has run on another shape.
        self._held = 0

    def turn_to(self, evidence: Observed, *, runs: bool) -> None:
        """Book for another shape, with its ``evidence``. ``runs`` is True if the candidate can still hold memory."""
        self._evidence, self._held = evidence, self.plan.candidate if runs and self._slot.on_gpu else 0

    @property
    def is_booked(self) -> bool:
        """True after the first booking."""
        return self._booking is not None

    @cached_property
    def whole(self) -> dict[str, int]:
        """Memory in bytes that the device's evaluations can book together, and the number of its slots."""
        siblings = self._slot.siblings
        if not self._slot.on_gpu:
            return {"whole": min(linux.physical_bytes(), siblings * _HOST_BYTES), "siblings": siblings}
        total = torch.cuda.get_device_properties(0).total_memory
        return {"whole": plan.capacity(total, siblings), "siblings": siblings}

    def book(self, wanted: plan.Plan) -> None:
        """Book a plan's GPU memory. If it is not free at once, release the earlier booking and wait."""
        if self._held and not wanted.candidate:
            # All slots together can draw first inputs next to such candidates of small problems.
            share = self.whole["whole"] // self.whole["siblings"]
            most = self.whole["whole"] if wanted.inputs else max(share, self._held + share // 2)
            most = max(0, min(most, self.whole["whole"]) - self._held)
            wanted = replace(wanted, reference=min(wanted.reference, most), candidate=self._held)
        self.plan = wanted
        if not self._slot.on_gpu:
            return
        ledger = booking.Ledger(self._slot.ledger, self.whole["whole"])
        if self._booking is None or not self._booking.resize(wanted.total):
            self._wait(ledger, wanted.total)
        # The first draw can be in a kept reference, which has that memory already.
        is_new = wanted.inputs or self._is_tests
        if is_new and torch.cuda.mem_get_info()[0] < wanted.total:
            ledger.want_room()
        before = self._evidence.gpu_memory
        self._evidence.gpu_memory = wanted.evidence(before and before.used_bytes)
        if wanted.judge:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, wanted.judge / total))

    def _wait(self, ledger: booking.Ledger, needed: int) -> None:
        """Release the earlier booking, and wait until the memory is free."""
        if self._booking is not None:
            assert self._processes.reference is not None
            with self._steps.backstop(Phase.REFERENCE):
                self._processes.reference.cache.clear()
            self._booking.release()
        self._steps.enter(Phase.PREPARE)
        try:
            with self._steps.timed("wait_for_memory"):
                left_s = max(0.0, GPU_WAIT_S - self._steps.durations.get("wait_for_memory", 0.0))
                self._booking = ledger.book(needed, label=self._slot.name, wait_s=left_s)
        except booking.TooLarge:
            has = self.whole["whole"]
            raise EvaluationEnded(
                Category.REFERENCE_ERROR,
                f"the problem needs {needed / 2**30:.1f} GiB of the GPU's memory, of which evaluations can use"
                f" {has / 2**30:.1f} GiB",
                Phase.REFERENCE,
                needed_bytes=needed,
                allowed_bytes=has,
            ) from None
        except booking.NotInTime as error:
            raise EvaluationEnded(Category.JUDGE_ERROR, str(error), Phase.PREPARE) from None

    def record(self) -> None:
        """Record the GPU memory that the evaluation's processes hold, if it is large."""
        figures = self._evidence.gpu_memory
        if figures is None or self.plan.inputs + (self.plan.outputs or 0) < _MUCH_BYTES:
            return
        held = health.held_bytes(self._slot.device)
        if held is not None:
            self._evidence.gpu_memory = figures.model_copy(update={"used_bytes": max(held, figures.used_bytes or 0)})

    def after_kernel(self) -> int:
        """Return the bytes of GPU memory that the reference can use now that the kernel's share is free."""
        # More is booked for changed inputs and float64 if it is available at once.
        free = self.plan.reference + self.plan.candidate
        wanted = 2 * (self.plan.inputs + self.plan.reference)
        if wanted > free and self._booking is not None and self._booking.resize(self.plan.judge + wanted):
            return wanted
        return free

    def release(self) -> None:
        """Release the booking."""
        if self._booking is not None:
            self._booking.release()
