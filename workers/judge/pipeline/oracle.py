"""The float64 oracle: answers of the reference in float64, to separate a kernel's errors from the reference's own."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Final

import torch

from kqueue.contract import Precision
from workers.judge.channel.orders import Order
from workers.judge.channel.protocol import Reply
from workers.judge.channel.randomness import LARGER
from workers.judge.channel.tensors import TensorSpec, widened
from workers.judge.ending import EvaluationEnded
from workers.judge.pipeline import answers
from workers.judge.pipeline.cases import GIVEN, Case
from workers.judge.pipeline.proxy import Question, ReferenceProxy, dtype_of

#: Maximum share of the process's GPU memory for the reference in float64.
_MEMORY_SHARE: Final = 1 / 8
#: Relative changes of a value that are below the rounding error of each precision.
_ROUNDING: Final = {Precision.FP32: 2**-25, Precision.FP16: 2**-15, Precision.BF16: 2**-12}


class Oracle:
    """The float64 model of a problem, whose answers count only while it agrees with the reference.

    Attributes:
        is_useful: True if the model in float64 can be of use.
        left_s: estimated CPU time in seconds left for float64 answers.
        call_s: estimated CPU time in seconds of one float64 run.
    """

    def __init__(self, proxy: ReferenceProxy, exact_s: float, host_bytes: int) -> None:
        """Use a problem's process.

        Args:
            exact_s: CPU time in seconds for all float64 calls together. It is estimated before, because the time that
                they take depends on the work of other processes.
            host_bytes: memory for one float64 call on a CPU. On a GPU a share of the process's allowance counts.
        """
        self.is_useful = False
        self.left_s = self._exact_s = exact_s
        self._proxy = proxy
        self._form = proxy.form
        self._precision = proxy.settings.precision
        self._host_bytes = host_bytes
        self.call_s = 0.0
        #: Relation of the given cases' outputs to their float64 outputs, and the cases that wait for it.
        self._relation = answers.Relation(self._precision)
        self._waiting: list[Case] = []

    def widen(self) -> None:
        """Make a copy of the model in float64, if that is possible."""
        with contextlib.suppress(EvaluationEnded):
            self._proxy.order(Order.WIDEN, what="the model in float64", optional=True)
            self.is_useful = True

    def reset_time(self) -> None:
        """Reset the time for float64 outputs to its initial value."""
        self.left_s = self._exact_s

    def may_ask(self, case: Case, kind: str = "") -> bool:
        """Return whether a float64 answer to a case, or to one of another kind and its sizes, fits time and memory."""
        numbers = sum(t.numel() for t in case.inputs) + sum(math.prod(s.shape) for s in self._form.output_specs)
        # The kind LARGER is asked for alone and without much else in memory.
        each = 4 * 8 if LARGER not in (kind, case.kind) else 2 if self._asks_once(LARGER) else 4
        most = _MEMORY_SHARE * self._proxy.allowed_bytes if self._proxy.device == "cuda" else self._host_bytes
        return self.is_useful and self.left_s > 0 and each * numbers < most

    def _asks_once(self, kind: str) -> bool:
        """Return whether a case gets one float64 answer: its own, and none to nudged inputs."""
        return kind == GIVEN or (kind == LARGER and self._form.precision(self._precision) is Precision.FP32)

    def questions(self, case: Case, asked: int) -> list[Question]:
        """Return the questions for the float64 answers to a case in a batch with ``asked`` such questions."""
        if not self.may_ask(case) or asked * self.call_s >= self.left_s:
            return []
        return [self._question(case, nudged=i > 0) for i in range(1 if self._asks_once(case.kind) else 2)]

    def _question(self, case: Case, *, nudged: bool) -> Question:
        return Question.of(case, _ROUNDING[self._form.precision(self._precision)] if nudged else 0.0, wide=True)

    def charge(self, calls: int) -> None:
        """Count the time of float64 calls."""
        self.left_s -= calls * self.call_s

    def check(self, reply: Reply | EvaluationEnded) -> Reply | None:
        """Return the float64 reference's answer, or None if the problem does not support float64."""
        if isinstance(reply, Reply) and (reply.structure, reply.tensors) == (self._form.structure, self.specs):
            return reply
        self.is_useful = False
        return None

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Specifications of the float64 outputs."""
        return tuple(TensorSpec(widened(dtype_of(spec)), spec.shape, spec.device) for spec in self._form.output_specs)

    def tensors(self, reply: Reply | None) -> list[torch.Tensor] | None:
        """Return the tensors of an answer, or None if there is no answer or it is of no use."""
        if reply is None or not self.is_useful:
            return None
        return self._proxy.tensors(reply.tensors, reply.locations, "the model in float64")

    def sharpen(self, cases: Sequence[Case]) -> None:
        """Compute float64 outputs for given cases that have an answer, as far as time and memory allow.

        Raises:
            EvaluationEnded: the process has ended.
        """
        most = min(self.left_s / self.call_s if self.call_s > 0 else math.inf, len(cases))
        cases = [case for case in cases if self.may_ask(case)][: int(most)]
        replies = self._proxy.ask([self._question(case, nudged=False) for case in cases])
        self.charge(len(cases))
        exact_outputs = [self.tensors(self.check(reply)) for reply in replies]
        pairs = [(case, exact) for case, exact in zip(cases, exact_outputs, strict=True) if exact is not None]
        looks = [
            answers.Look(case.outputs, exact, None, varied=False, precision=self._precision) for case, exact in pairs
        ]
        answers.look_at(looks)
        for (case, exact), look in zip(pairs, looks, strict=True):
            if self.is_useful:
                case.exact = exact
                self.relate(case, look)

    def relate(self, case: Case, look: answers.Look) -> None:
        """Use float64 outputs only once all given answers show that the float64 model is the same model."""
        self._relation.add(look)
        case.exact, case.unproven = None, case.exact
        self._waiting.append(case)
        if self._relation.is_far:
            self.is_useful = False
        elif not self._relation.is_near:
            return
        for one in self._waiting:
            if self.is_useful and one.unproven is not None and one.outputs:
                one.exact = one.unproven
            one.unproven = None
        self._waiting = []

    @property
    def is_related(self) -> bool:
        """True if the float64 model is known to be the same model."""
        return self.is_useful and self._relation.is_near
