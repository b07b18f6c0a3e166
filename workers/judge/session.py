"""The buffers that the judge and one candidate share, and what goes through them."""

from __future__ import annotations

from typing import Any, Final

import torch

from kqueue.categories import Category
from kqueue.contract import Phase, Settings
from workers.channel.buffers import SharedTensor
from workers.channel.protocol import Answer, Binding, Job, Order, Reply
from workers.judge import compare
from workers.judge.ending import EvaluationEnded
from workers.judge.problem import Case, Problem, same_bits
from workers.judge.process import CandidateProcess
from workers.sandbox.launch import ForkServerError

#: How long a process may take to open the device, in seconds; others may be opening it at the same time.
_PREPARE_S: Final = 120.0


class Session:
    """One candidate in the judge's hands: its process, and the inputs and outputs shared with it."""

    def __init__(self, process: CandidateProcess, problem: Problem) -> None:
        self.process = process
        self._problem = problem
        self._deadlines = problem.settings.deadlines
        self._opening = 0
        self._inputs: list[SharedTensor] = []
        self._outputs: list[SharedTensor] = []

    def begin(self, job: Job) -> None:
        """Have the process get ready, and do not wait for it. None of the kernel's code runs yet."""
        self.process.enter(Phase.PREPARE, _PREPARE_S)
        self.process.start_clock()
        self._opening = self.process.send(Order.OPEN, payload=job)

    def construct(self, case: Case, *, rehearse: bool) -> None:
        """Import the source, construct the model, share inputs of the case's form, filled.

        Args:
            case: fills the inputs.
            rehearse: compile Triton's kernels now, while the device need not be had alone.

        Raises:
            ForkServerError: the process could not be made ready; nothing of the kernel has run.
        """
        try:
            self.process.receive(self._opening)
        except EvaluationEnded as ended:
            raise ForkServerError(f"a candidate's process could not be made ready: {ended}") from None
        self.process.stop_clock()
        self.process.enter(Phase.LOAD, self._deadlines.load_s)
        self.process.order(Order.LOAD)
        self.process.enter(Phase.CONSTRUCT, self._deadlines.construct_s)
        self.process.order(Order.CONSTRUCT)
        self._inputs = [SharedTensor(tensor) for tensor in case.inputs]
        self.load(case)
        self.settle()
        self._bind(Order.BIND_INPUTS, self._inputs, arguments=self._problem.arguments, tensors=self._problem.places)
        if rehearse:
            self.process.enter(Phase.COMPILE, self._deadlines.compile_s)
            self.process.order(Order.REHEARSE)

    def prepare_calls(self, case: Case) -> None:
        """Share outputs of the case's form, poisoned. Begins the check phase."""
        self.process.enter(Phase.CHECK, self._deadlines.check_s)
        self._outputs = [SharedTensor(tensor.contiguous()) for tensor in case.outputs]
        self._bind(Order.BIND_OUTPUTS, self._outputs, structure=self._problem.structure)

    def _bind(self, order: Order, shared_tensors: list[SharedTensor], **binding: Any) -> None:
        payload = Binding(tuple(shared.spec for shared in shared_tensors), **binding)
        fds = tuple(shared.descriptor for shared in shared_tensors if shared.descriptor is not None)
        self.process.order(order, payload=payload, fds=fds)
        for shared in shared_tensors:
            shared.close()

    def load(self, case: Case) -> None:
        """Write a case's inputs and poison the outputs; :meth:`settle` waits until that has happened."""
        for shared, own in zip(self._inputs, case.inputs, strict=True):
            shared.tensor.copy_(own)
        for shared in self._outputs:
            shared.poison()

    def run(self, case: Case) -> dict[str, Any]:
        """One checked call on a case.

        Returns:
            how far it was from right: see :func:`compare.check_values`.

        Raises:
            EvaluationEnded: anything but a right answer.
        """
        self.load(case)
        self.settle()
        reply = self.process.order(Order.RUN, seed=case.seed)
        self.check_form(reply, case)
        if not self._problem.mutates_inputs:
            for i, (shared, own) in enumerate(zip(self._inputs, case.inputs, strict=True)):
                if not same_bits(shared.tensor, own):
                    raise EvaluationEnded(
                        Category.INPUT_MUTATED, f"forward changed its input tensor {i}", Phase.CHECK, input=i
                    )
        return compare.check_values(self.snapshot(), case, self.settings)

    def check_form(self, reply: Reply, case: Case) -> None:
        """Refuse outputs that the candidate could not deliver."""
        if reply.answer is Answer.MISMATCH:
            compare.check_form(reply, self._problem.structure, case.outputs)

    def snapshot(self) -> list[torch.Tensor]:
        """The outputs as they are now, in memory of the judge's own."""
        copies = [shared.tensor.clone() for shared in self._outputs]
        self.settle()
        return copies

    def settle(self) -> None:
        """Wait until the judge's own writes have happened."""
        if self._problem.device == "cuda":
            torch.cuda.synchronize()

    @property
    def settings(self) -> Settings:
        """How the evaluation is judged."""
        return self._problem.settings
