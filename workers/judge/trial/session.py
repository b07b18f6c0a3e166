"""The buffers that the judge and one candidate share, and what goes through them."""

from __future__ import annotations

import os
from typing import Any, Final

import torch

from kqueue.categories import Category
from kqueue.contract import Phase, Settings
from workers.judge.channel import activities
from workers.judge.channel.activities import Activity
from workers.judge.channel.buffers import Imports, PlaceError, SharedTensor, form_of, view_within
from workers.judge.channel.flags import memory
from workers.judge.channel.protocol import Answer, Binding, Job, Order, Place, Reply, TensorSpec, Where
from workers.judge.keeper.handle import ForkServerError
from workers.judge.keeper.process import CandidateProcess
from workers.judge.trial import compare
from workers.judge.trial.ending import EvaluationEnded
from workers.judge.trial.problem import Case, Problem, same_bits

#: How long a process may take to open the device, in seconds; others may be opening it at the same time.
_PREPARE_S: Final = 120.0


class Session:
    """One candidate in the judge's hands: its process, the inputs shared with it, and its outputs."""

    def __init__(self, process: CandidateProcess, problem: Problem) -> None:
        self.process = process
        self._problem = problem
        self._deadlines = problem.settings.deadlines
        self._opening = 0
        self._inputs: list[SharedTensor] = []
        #: Outputs that the candidate writes: on a CPU. On a GPU the judge reads them where they are.
        self._outputs: list[SharedTensor] = []
        self._imports = Imports()
        #: The reference's outputs: what a candidate's must look like.
        self._like: list[torch.Tensor] = []

    def begin(self, job: Job) -> None:
        """Have the process get ready, and do not wait for it. None of the kernel's code runs yet."""
        self._opening = self.process.send(Order.OPEN, payload=job)

    def construct(self, case: Case, *, rehearse: bool) -> None:
        """Import the source, construct the model, share inputs of the case's form, filled.

        Args:
            case: fills the inputs.
            rehearse: compile now what the first call would compile, while the device need not be had alone.

        Raises:
            ForkServerError: the process could not be made ready; nothing of the kernel has run.
        """
        self.process.enter(Phase.PREPARE, _PREPARE_S)
        self.process.start_clock()
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
        """Tell the outputs' form, which is the case's. Begins the check phase."""
        self.process.enter(Phase.CHECK, self._deadlines.check_s)
        self._like = case.outputs
        if self._problem.device == "cpu":
            self._outputs = [SharedTensor(tensor.contiguous()) for tensor in case.outputs]
            self.poison()
            self._bind(Order.BIND_OUTPUTS, self._outputs, structure=self._problem.structure)
        else:
            form = tuple(form_of(tensor) for tensor in case.outputs)
            self.process.order(Order.BIND_OUTPUTS, payload=Binding(form, structure=self._problem.structure))

    def _bind(self, order: Order, shared_tensors: list[SharedTensor], **binding: Any) -> None:
        payload = Binding(tuple(shared.spec for shared in shared_tensors), **binding)
        fds = tuple(shared.descriptor for shared in shared_tensors if shared.descriptor is not None)
        self.process.order(order, payload=payload, fds=fds)
        for shared in shared_tensors:
            shared.close()

    def load(self, case: Case) -> None:
        """Write a case's inputs; :meth:`settle` waits until that has happened."""
        for shared, own in zip(self._inputs, case.inputs, strict=True):
            shared.tensor.copy_(own)

    def poison(self) -> None:
        """Fill what a candidate writes its outputs to, so that what it does not write shows."""
        for shared in self._outputs:
            shared.poison()

    def run(self, case: Case) -> dict[str, Any]:
        """One checked call on a case.

        Returns:
            the error's figures.

        Raises:
            EvaluationEnded: anything but a right answer.
        """
        self.load(case)
        self.poison()
        self.settle()
        views = self.outputs(self.process.order(Order.RUN, seed=case.seed))
        if not self._problem.mutates_inputs:
            for i, (shared, own) in enumerate(zip(self._inputs, case.inputs, strict=True)):
                if not same_bits(shared.tensor, own):
                    raise EvaluationEnded(
                        Category.INPUT_MUTATED, f"forward changed its input tensor {i}", Phase.CHECK, input=i
                    )
        return compare.check_values(self.snapshot(views), case, self.settings)

    def profile(self, case: Case) -> list[Activity]:
        """What a call runs on the GPU, as the candidate tells it.

        Raises:
            NotRecorded: it tells nothing, or nothing that can be read.
            EvaluationEnded: it did not survive being recorded.
        """
        self.process.enter(Phase.CHECK, self._deadlines.check_s)
        self.load(case)
        self.settle()
        page = memory("kqueue-profile", activities.SIZE)
        try:
            self.process.order(Order.PROFILE, fds=(page,))
            return activities.decode(os.pread(page, activities.SIZE, 0))
        finally:
            os.close(page)

    def outputs(self, reply: Reply) -> list[torch.Tensor]:
        """The outputs of a call where they lie, in memory that the candidate may still write.

        Raises:
            EvaluationEnded: they do not have the reference's form, or do not lie where they are said to.
        """
        expected = tuple(TensorSpec.of(tensor) for tensor in self._like)
        if reply.answer is Answer.MISMATCH or reply.tensors != expected or reply.structure != self._problem.structure:
            compare.check_form(reply, self._problem.structure, self._like)
        self._imports.make_room(len(reply.places))
        return [
            self._output(i, spec, place)
            for i, (spec, place) in enumerate(zip(reply.tensors, reply.places, strict=True))
        ]

    def _output(self, i: int, spec: TensorSpec, place: Place) -> torch.Tensor:
        try:
            if 0 in spec.shape:
                return torch.empty_like(self._like[i])
            if place.where is Where.SHARED and self._outputs:
                return self._outputs[i].tensor
            if place.where is Where.EXPORTED and not self._outputs:
                return self._imports.view(place, spec)
            if place.where is Where.INPUT and place.index < len(self._inputs):
                view = view_within(self._inputs[place.index].flat, place, spec)
                if self._problem.output_aliases[i] == place.index:
                    return view
                raise EvaluationEnded(
                    Category.WRONG_OUTPUT_STRUCTURE,
                    f"output {i} is a view of input {place.index}, the reference's is memory of its own",
                    Phase.CHECK,
                    output=i,
                    input=place.index,
                )
            raise PlaceError("an output that was not delivered")
        except PlaceError as error:
            raise EvaluationEnded(Category.SANDBOX_VIOLATION, f"the candidate answered with {error}", None) from None

    def blanks(self) -> list[torch.Tensor]:
        """Memory of the judge's own for one call's outputs."""
        return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in self._like]

    def snapshot(self, views: list[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs as they are now, in memory of the judge's own."""
        copies = self.blanks()
        copy_out(views, copies)
        self.settle()
        return copies

    def settle(self) -> None:
        """Wait until the judge's own work has happened."""
        if self._problem.device == "cuda":
            torch.cuda.synchronize()

    @property
    def settings(self) -> Settings:
        """How the evaluation is judged."""
        return self._problem.settings


def copy_out(views: list[torch.Tensor], into: list[torch.Tensor]) -> None:
    """Copy outputs from where they lie into memory of the judge's own; does not wait for it."""
    for view, copy in zip(views, into, strict=True):
        copy.copy_(view)
