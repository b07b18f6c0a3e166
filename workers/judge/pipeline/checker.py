"""The check that comes with a problem: its ``check()`` decides whether outputs are right.

It is the problem's code, so only the reference's process runs it. The judge checks forms and memory before it asks, and
finds out whether the check is one: it must accept the reference's outputs, and refuse wrong ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from workers.judge.channel.bits import same_bits
from workers.judge.channel.buffers import SharedTensor
from workers.judge.channel.orders import Order
from workers.judge.channel.protocol import Answer
from workers.judge.channel.tensors import PACKED, output_name, widened
from workers.judge.pipeline.blame import invalid_problem
from workers.judge.pipeline.case_cache import CaseCache
from workers.judge.pipeline.cases import Case, size
from workers.judge.pipeline.proxy import ReferenceProxy

#: Maxima of the outputs of a problem with a check: their number, because each output and the reference's are sent with
#: a descriptor, and their size in bytes, because of larger outputs of timed calls only pieces are kept.
MOST: Final = 64
MOST_BYTES: Final = 64 << 20
_Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class Checker:
    """The check of one problem.

    Attributes:
        bound: relative change of right outputs that the problem promises to refuse.
        accepted: outputs in another order that the check accepts, in words.
    """

    _proxy: ReferenceProxy
    _cache: CaseCache
    bound: float
    accepted: list[str] = field(default_factory=list[str])

    def refusal(self, case: Case, outputs: Sequence[torch.Tensor]) -> str:
        """Return what the check says against outputs for an answered case, or an empty text if it accepts them.

        Raises:
            EvaluationEnded: the problem failed, because its check must have an answer for any values.
        """
        proxy, count = self._proxy, len(self._numbers)
        self._cache.present(case)
        shared: list[SharedTensor] = []
        try:
            with proxy.blaming("check()"):
                for tensor in (*case.outputs[:count], *outputs[:count]):
                    shared.append(SharedTensor(tensor))
                    shared[-1].tensor.copy_(tensor)
                proxy.exchange.settle()
            payload = case.slot, proxy.form.structure, [one.spec for one in shared]
            fds = tuple(one.descriptor for one in shared if one.descriptor is not None)
            reply = proxy.order(Order.CHECK, what="check()", payload=payload, fds=fds, seed=case.seed)
        finally:
            for one in shared:
                one.free()
        return reply.message or "it gave no reason" if reply.answer is Answer.MISMATCH else ""

    @property
    def _numbers(self) -> range:
        """Numbers of the outputs to check, which gradients follow."""
        return range(self._proxy.form.returned - len(self._proxy.form.gradient_names))

    def prove(self, cases: Sequence[Case]) -> None:
        """Ask about wrong outputs for answered cases.

        Raises:
            EvaluationEnded: ``invalid_problem`` if the check accepts some for every case.
        """
        numbers, order = self._numbers, "the reference's values in another order"
        changes: dict[str, _Change] = {
            "zeros": torch.zeros_like,
            "infinity or the largest integers": _largest,
            f"values that differ by more than CHECK_BOUND = {self.bound:g}": self._moved,
            order: lambda one: one.reshape(-1)[torch.randperm(one.numel(), device=one.device)].view(one.shape),
        }
        for what, change in changes.items():
            for some in (numbers, *([number] for number in numbers if len(numbers) > 1)):
                if self._accepts(cases, some, change):
                    found = f"{what} as {', '.join(output_name(number, self._proxy.form.paths) for number in some)}"
                    if what != order:
                        raise invalid_problem(f"check() accepts {found}, so it cannot decide: it must refuse them")
                    self.accepted.append(found)

    def _accepts(self, cases: Sequence[Case], numbers: Sequence[int], change: _Change) -> bool:
        """Return whether the check accepts changed outputs for all cases where the change makes a difference."""
        tried = False
        for case in cases:
            outputs = list(case.outputs)
            for i in numbers:
                raw = outputs[i].view(torch.uint8) if outputs[i].dtype in PACKED else outputs[i]
                outputs[i] = change(raw).view(outputs[i].dtype) if raw.numel() else outputs[i]
            if not all(map(same_bits, outputs, case.outputs)):
                tried = True
                if self.refusal(case, outputs):
                    return False
        return tried

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Move each number by twice the bound of the usual size, up or down, or replace that share of other values."""
        random_numbers = torch.rand(tensor.shape, device=tensor.device)
        if tensor.is_floating_point() or tensor.is_complex():
            usual = size(tensor) / tensor.numel() ** 0.5
            step = 2 * self.bound * torch.where(usual == 0, 1.0, usual)
            return (tensor.to(widened(tensor.dtype)) + torch.where(random_numbers < 0.5, -step, step)).to(tensor.dtype)
        wide, low = tensor.long(), tensor.long().min()
        span = max(int(wide.max() - low) + 1, 2)
        other = low + (wide - low + torch.randint_like(wide, 1, span)) % span
        return torch.where(random_numbers <= max(self.bound, float(random_numbers.min())), other, wide).to(tensor.dtype)


def _largest(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.full_like(tensor, math.inf if tensor.itemsize > 1 else torch.finfo(tensor.dtype).max)
    return torch.full_like(tensor, True if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max)
