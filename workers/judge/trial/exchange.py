"""The buffers that the judge and one sealed process share, and the calls that go through them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import torch

from kqueue.categories import Category
from kqueue.contract import Deadlines, Phase, Settings
from workers.judge.channel import activities
from workers.judge.channel.activities import Activity
from workers.judge.channel.buffers import PlaceError, SharedTensor, form_of, is_dense, view_within
from workers.judge.channel.flags import memory
from workers.judge.channel.protocol import Answer, Binding, Job, Order, Place, Reply, TensorSpec, Where
from workers.judge.ending import EvaluationEnded
from workers.judge.keeper.handle import ForkServerError
from workers.judge.keeper.process import SealedProcess
from workers.judge.trial import compare
from workers.judge.trial.cases import Case, same_bits

#: How long a process may take to open the device, in seconds; others may be opening it at the same time.
PREPARE_S: Final = 120.0


@dataclass(slots=True)
class Form:
    """The form of a problem's calls, as its reference makes them.

    Attributes:
        arguments: the arrangement of ``forward``'s arguments; None until the first case is known.
        structure: the outputs' arrangement; known from the first answer on, as is
        output_aliases: for each output, the number of the input whose memory it shares, else None.
        mutates_inputs: True if the reference has changed an input.
    """

    arguments: Any = None
    structure: str = ""
    output_aliases: tuple[int | None, ...] = ()
    mutates_inputs: bool = False


@dataclass(frozen=True, slots=True)
class OwnOutput:
    """An output in a process's own memory, on a CPU.

    Attributes:
        process: whose.
        address: where it begins.
        shape, strides, dtype: its layout; it is dense.
    """

    process: SealedProcess
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def stride(self) -> tuple[int, ...]:
        """Return the strides, as a tensor does."""
        return self.strides

    def read(self, into: torch.Tensor) -> None:
        """Copy it into memory of the judge's own, which takes its layout.

        Raises:
            EvaluationEnded: the process has no such memory, or has ended.
        """
        process = self.process
        assert process.memory is not None
        try:
            process.memory.read(self.address, into.as_strided_(self.shape, self.strides))
        except PlaceError as error:
            message = f"the process answered with {error}"
            raise EvaluationEnded(Category.SANDBOX_VIOLATION, message, process.phase) from None
        except EOFError:
            raise process.died() from None


#: An output where it lies, in memory that its process may still write.
Output = torch.Tensor | OwnOutput


class Exchange:
    """One sealed process in the judge's hands: the inputs that it shares with it, and its outputs.

    Attributes:
        process: the process.
        form: of the problem's calls; it may become known later.
    """

    def __init__(self, process: SealedProcess, form: Form, device: str, *, wide: bool = False) -> None:
        """Share nothing yet.

        Args:
            process: the process.
            form: of the problem's calls; it may become known later.
            device: ``cpu`` or ``cuda``.
            wide: mean the process's model in float64.
        """
        self.process = process
        self.form = form
        self._device = device
        self._wide = wide
        self._inputs: list[SharedTensor] = []
        #: Further sets of inputs, for drawing ahead.
        self._more: list[list[SharedTensor]] = []
        #: What the outputs must look like.
        self._specs: tuple[TensorSpec, ...] = ()

    def bind_inputs(self, like: Sequence[torch.Tensor], *, fill: Sequence[torch.Tensor] = (), sets: int = 1) -> None:
        """Share inputs of the form of ``like``.

        Args:
            like: tensors of the form.
            fill: their values, where they are to have some.
            sets: how many sets of such inputs to share; calls use the first.
        """
        free([*self._inputs, *chain.from_iterable(self._more)])
        self._inputs, *self._more = ([SharedTensor(tensor) for tensor in like] for _ in range(sets))
        for shared, own in zip(self._inputs, fill, strict=False):
            shared.tensor.copy_(own)
        self.settle()
        every = [*self._inputs, *chain.from_iterable(self._more)]
        payload = Binding(tuple(shared.spec for shared in every), arguments=self.form.arguments)
        fds = tuple(shared.descriptor for shared in every if shared.descriptor is not None)
        self.process.order(Order.BIND_INPUTS, payload=payload, fds=fds, wide=self._wide)
        for shared in every:
            shared.close()

    def bind_outputs(self, specs: Sequence[TensorSpec]) -> None:
        """Tell the outputs' form."""
        self._specs = tuple(specs)
        buffers = tuple(form_of(torch.empty(spec.shape, dtype=spec.dtype, device="meta")) for spec in specs)
        binding = Binding(buffers, structure=self.form.structure)
        self.process.order(Order.BIND_OUTPUTS, payload=binding, wide=self._wide)

    def load(self, inputs: Sequence[torch.Tensor]) -> None:
        """Write inputs; :meth:`settle` waits until that has happened."""
        for shared, own in zip(self._inputs, inputs, strict=True):
            shared.tensor.copy_(own)

    def inputs(self, sets: int) -> list[list[torch.Tensor]]:
        """Return the first sets of shared inputs as they are now, in memory of the judge's own."""
        chosen = [self._inputs, *self._more][:sets]
        copies = [[shared.tensor.clone() for shared in inputs] for inputs in chosen]
        self.settle()
        return copies

    def changed(self, inputs: Sequence[torch.Tensor]) -> int | None:
        """Return the number of the first shared input that is not what was loaded; None if all are."""
        for i, (shared, own) in enumerate(zip(self._inputs, inputs, strict=True)):
            if not same_bits(shared.tensor, own):
                return i
        return None

    def outputs(self, reply: Reply) -> list[Output]:
        """Return the outputs of a call where they lie.

        Raises:
            EvaluationEnded: they do not have the reference's form, or do not lie where they are said to.
        """
        structure = self.form.structure
        if reply.answer is Answer.MISMATCH or reply.tensors != self._specs or reply.structure != structure:
            compare.check_form(reply, structure, self._specs)
        return [
            self._output(i, spec, place)
            for i, (spec, place) in enumerate(zip(reply.tensors, reply.places, strict=True))
        ]

    def _output(self, i: int, spec: TensorSpec, place: Place) -> Output:
        try:
            if 0 in spec.shape:
                return torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
            if place.where is Where.OWN and self.process.memory is not None:
                if spec.dtype is None or not is_dense(spec.shape, place.stride):
                    raise PlaceError("an output of an impossible layout")
                return OwnOutput(self.process, place.offset, spec.shape, place.stride, spec.dtype)
            if place.where is Where.EXPORTED and self.process.memory is None:
                return self.process.imports.view(place, spec)
            if place.where is Where.INPUT and place.index < len(self._inputs):
                view = view_within(self._inputs[place.index].flat, place, spec)
                if self.may_alias(i, place.index):
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
            message = f"the process answered with {error}"
            raise EvaluationEnded(Category.SANDBOX_VIOLATION, message, self.process.phase) from None

    def may_alias(self, output: int, number: int) -> bool:
        """Return whether an output may be a view of an input: where the reference's is one too."""
        return self.form.output_aliases[output] == number

    def blanks(self) -> list[torch.Tensor]:
        """Return memory of the judge's own for one call's outputs."""
        return [torch.empty(spec.shape, dtype=spec.dtype, device=self._device) for spec in self._specs]

    def snapshot(self, views: Sequence[Output]) -> list[torch.Tensor]:
        """Return the outputs as they are now, in memory of the judge's own."""
        copies = self.blanks()
        copy_out(views, copies)
        self.settle()
        return copies

    def settle(self) -> None:
        """Wait until the judge's own work has happened."""
        if self._device == "cuda":
            torch.cuda.synchronize()


class Candidate(Exchange):
    """A candidate, from its opening to its last checked call."""

    def __init__(self, process: SealedProcess, form: Form, settings: Settings, device: str) -> None:
        super().__init__(process, form, device)
        self._settings = settings
        self._deadlines: Deadlines = settings.deadlines
        self._opening = 0

    def begin(self, job: Job) -> None:
        """Have the process get ready, and do not wait for it. None of the kernel's code runs yet."""
        self._opening = self.process.send(Order.OPEN, payload=job)

    def construct(self, init_inputs: list[Any] | dict[str, Any], case: Case, *, rehearse: bool) -> None:
        """Import the source, construct the model, share inputs of the case's form, filled.

        Args:
            init_inputs: the constructor's arguments.
            case: fills the inputs.
            rehearse: compile now what the first call would compile, while the device need not be had alone.

        Raises:
            ForkServerError: the process could not be made ready; nothing of the kernel has run.
        """
        await_opening(self.process, self._opening)
        self.process.enter(Phase.LOAD, self._deadlines.load_s)
        self.process.order(Order.LOAD)
        self.process.enter(Phase.CONSTRUCT, self._deadlines.construct_s)
        self.process.order(Order.CONSTRUCT, payload=init_inputs)
        self.bind_inputs(case.inputs, fill=case.inputs)
        if rehearse:
            self.process.enter(Phase.COMPILE, self._deadlines.compile_s)
            self.process.order(Order.REHEARSE)

    def prepare_calls(self, case: Case) -> None:
        """Tell the outputs' form, which is the case's. Begins the check phase."""
        self.process.enter(Phase.CHECK, self._deadlines.check_s)
        self.bind_outputs([TensorSpec.of(tensor) for tensor in case.outputs])

    def run(self, case: Case) -> dict[str, Any]:
        """Make one checked call on a case.

        Returns:
            the error's figures.

        Raises:
            EvaluationEnded: anything but a right answer.
        """
        self.load(case.inputs)
        self.settle()
        views = self.outputs(self.process.order(Order.RUN, seed=case.seed))
        if not self.form.mutates_inputs and (i := self.changed(case.inputs)) is not None:
            raise EvaluationEnded(Category.INPUT_MUTATED, f"forward changed its input tensor {i}", Phase.CHECK, input=i)
        return compare.check_values(self.snapshot(views), case, self._settings)

    def profile(self, case: Case) -> list[Activity]:
        """Return what a call runs on the GPU, as the candidate tells it.

        Raises:
            NotRecorded: it tells nothing, or nothing that can be read.
            EvaluationEnded: it did not survive being recorded.
        """
        self.process.enter(Phase.CHECK, self._deadlines.check_s)
        self.load(case.inputs)
        self.settle()
        page = memory("kqueue-profile", activities.SIZE)
        try:
            self.process.order(Order.PROFILE, fds=(page,))
            return activities.decode(os.pread(page, activities.SIZE, 0))
        finally:
            os.close(page)


def await_opening(process: SealedProcess, opening: int) -> None:
    """Wait until a process has opened the device.

    Raises:
        ForkServerError: it could not; nothing foreign has run.
    """
    process.enter(Phase.PREPARE, PREPARE_S)
    process.start_clock()
    try:
        process.receive(opening)
    except EvaluationEnded as ended:
        raise ForkServerError(f"a sealed process could not be made ready: {ended}") from None
    process.stop_clock()


def free(buffers: list[SharedTensor]) -> None:
    """Give shared buffers back; work on them is waited for."""
    if any(shared.spec.device == "cuda" for shared in buffers):
        torch.cuda.synchronize()
    for shared in buffers:
        shared.free()


def copy_out(views: Sequence[Output], into: list[torch.Tensor]) -> None:
    """Copy outputs from where they lie into memory of the judge's own; does not wait for it.

    Raises:
        EvaluationEnded: on a CPU, they do not lie there.
    """
    for view, copy in zip(views, into, strict=True):
        if isinstance(view, OwnOutput):
            view.read(copy)
        else:
            copy.copy_(view)
