"""Buffers shared by the judge and one sealed process, and the calls that use them."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any, Final, TypeVar

import numpy as np
import torch

from kqueue.categories import Category
from kqueue.contract import Deadlines, Phase, Settings
from workers.judge.channel import activities
from workers.judge.channel.activities import Activity
from workers.judge.channel.bits import differ, same_bits
from workers.judge.channel.buffers import LocationError, SharedTensor, form_of, is_dense, view_within
from workers.judge.channel.flags import memory
from workers.judge.channel.orders import Binding, Job, Order
from workers.judge.channel.protocol import Answer, Reply
from workers.judge.channel.tensors import LASTING, Location, TensorSpec, Where, output_name
from workers.judge.ending import EvaluationEnded
from workers.judge.forkserver.handle import ForkServerError
from workers.judge.forkserver.process import SealedProcess
from workers.judge.pipeline.cases import Case, Form
from workers.judge.pipeline.plan import Plan

_Pair = TypeVar("_Pair")
_RANDOM: Final = random.SystemRandom()
#: Time of the GPU's work for a call, in times of the reference's forward, after which other slots need not wait.
_SLOWEST: Final = 300
#: Number of steps to find out whether two layouts overlap. More are needed only for layouts made for that.
_SOLVED: Final[Any] = 1 << 16
#: Maximum time in seconds for a process to open the device, which other processes can be opening at the same time.
PREPARE_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class OwnOutput:
    """An output in a process's own memory, on a CPU, with a dense layout."""

    process: SealedProcess
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def stride(self) -> tuple[int, ...]:
        """Return the strides, like ``Tensor.stride``."""
        return self.strides

    def read(self, into: torch.Tensor) -> None:
        """Copy the output into the judge's own memory, with the same layout.

        Raises:
            EvaluationEnded: the process has no such memory, or has ended.
        """
        process = self.process
        assert process.memory is not None
        try:
            process.memory.read(self.address, into.as_strided_(self.shape, self.strides))
        except LocationError as error:
            message = f"the process answered with {error}"
            raise EvaluationEnded(Category.SANDBOX_VIOLATION, message, process.phase) from None
        except EOFError:
            raise process.died() from None


#: An output in memory that its process can still write.
Output = torch.Tensor | OwnOutput


class Exchange:
    """The inputs that the judge shares with one sealed process, and its outputs."""

    def __init__(self, process: SealedProcess, form: Form, device: str) -> None:
        """Use a process without sharing anything yet. The form of its calls can become known later."""
        self.process = process
        self.form = form
        self._device = device
        self._inputs: list[SharedTensor] = []
        #: Required form of the outputs.
        self._specs: tuple[TensorSpec, ...] = ()

    def set_up(self, inputs: Sequence[torch.Tensor]) -> float | None:
        """Call the model's setup(), which gets the form of the inputs. Return its time in ms, or None without one."""
        wanted, arguments = self.form.gradients, self.form.arguments
        if wanted is not None and wanted.outputs:
            arguments = arguments[0]  # Upstream gradients follow.
        form = Binding(tuple(form_of(tensor.to("meta")) for tensor in inputs), arguments, self.form.views)
        begun = time.perf_counter()
        reply = self.process.order(Order.SET_UP, payload=form)
        return None if reply.answer is Answer.MISMATCH else 1e3 * (time.perf_counter() - begun)

    def bind_inputs(self, inputs: Sequence[torch.Tensor]) -> None:
        """Share new memory with the form and the values of ``inputs``."""
        self.unbind()
        self._inputs = [SharedTensor(tensor) for tensor in inputs]
        self.load(inputs)
        self.settle()
        buffers = tuple(shared.spec for shared in self._inputs)
        form = self.form
        payload = Binding(
            buffers,
            arguments=form.arguments,
            views=form.views,
            differentiates=form.differentiates,
            resets=form.resets,
            compared=len(form.buffers),
            gradients=form.gradients,
        )
        fds = tuple(shared.descriptor for shared in self._inputs if shared.descriptor is not None)
        self.process.order(Order.BIND_INPUTS, payload=payload, fds=fds)
        for shared in self._inputs:
            shared.close()

    def unbind(self) -> None:
        """Free the shared inputs in the judge, after pending work on them has finished."""
        self.settle()
        for shared in self._inputs:
            shared.free()
        self._inputs = []

    def bind_outputs(self, specs: Sequence[TensorSpec]) -> None:
        """Send the form of the outputs to the process."""
        self._specs = tuple(specs)
        returned = self._specs[: self.form.returned]
        buffers = tuple(form_of(torch.empty(spec.shape, dtype=spec.dtype, device="meta")) for spec in returned)
        binding = Binding(buffers, structure=self.form.structure, lasting=self.form.lasting)
        self.process.order(Order.BIND_OUTPUTS, payload=binding)

    def load(self, inputs: Sequence[torch.Tensor]) -> None:
        """Start writing inputs to the shared memory, in random order. :meth:`settle` waits for the end."""
        for shared, own in _shuffled(zip(self._inputs, inputs, strict=True)):
            shared.tensor.copy_(own)

    def check_inputs(self, case: Case) -> None:
        """Raise EvaluationEnded (``input_mutated``) if a call changed an input that the reference does not change."""
        every = zip(self._inputs, case.inputs, strict=True)
        self.refuse_changes(not same_bits(shared.tensor, own) for shared, own in every)

    def changes(self, case: Case) -> list[torch.Tensor]:
        """Return whether each shared input differs from the case's on a GPU, without waiting for it."""
        return [differ(shared.tensor, own) for shared, own in zip(self._inputs, case.inputs, strict=True)]

    def refuse_changes(self, changes: Iterable[bool | torch.Tensor]) -> None:
        """Raise EvaluationEnded (``input_mutated``) for the first changed input that the reference does not change."""
        for i, is_changed in enumerate(changes):
            if i not in self.form.mutated and is_changed:
                number = self.form.argument(i)
                message = f"forward changed its {self.form.input_name(i)}"
                raise EvaluationEnded(Category.INPUT_MUTATED, message, self.process.phase, input=number)

    def outputs(self, reply: Reply) -> list[Output]:
        """Return views of a call's outputs in the process's memory, of the inputs and of the buffers that it changes.

        Raises:
            EvaluationEnded: they do not have the reference's form, or are not at the reported location.
        """
        structure, returned = self.form.structure, self._specs[: self.form.returned]
        tensors, count = reply.tensors[: len(returned)], len(returned) + len(self.form.buffers)
        is_complete = reply.answer is not Answer.MISMATCH and len(reply.tensors) == count
        if not is_complete or tensors != returned or reply.structure != structure:
            check_form(replace(reply, tensors=tensors) if is_complete else reply, self.form, returned)
        views = [
            self._output(i, spec, location)
            for i, (spec, location) in enumerate(zip(tensors, reply.locations, strict=False))
        ]
        self._refuse_shared(views[: len(views) - len(self.form.gradient_names)])
        views += [self._inputs[number].tensor for number in self.form.mutated]
        kept = zip(reply.tensors[len(returned) :], reply.locations[len(returned) :], strict=True)
        return views + [self._buffer(self.form.effects + i, *each) for i, each in enumerate(kept)]

    def _refuse_shared(self, views: Sequence[Output]) -> None:
        """Raise EvaluationEnded for two outputs that overlap, if the reference has separate memory for them."""
        memories = self.form.memories
        for (i, a), (k, b) in combinations(enumerate(views), 2):
            if memories[i] != memories[k] and np.may_share_memory(_place(a), _place(b), max_work=_SOLVED):
                one, two = (output_name(number, self.form.paths) for number in (i, k))
                message = f"{two} shares memory with {one}, and the reference's does not: return a copy"
                raise _wrong(Category.WRONG_OUTPUT_STRUCTURE, message, output=k)

    def written(self, views: Sequence[Output], reply: Reply) -> list[torch.Tensor]:
        """Return the outputs of a call on a GPU that are not in memory of a model."""
        return [
            view
            for i, (view, location) in enumerate(zip(views, reply.locations, strict=False))
            if isinstance(view, torch.Tensor)
            and location.where is Where.EXPORTED
            and location.index != LASTING
            and i < self.form.returned
            and i not in self.form.lasting
        ]

    def _buffer(self, number: int, spec: TensorSpec, location: Location) -> Output:
        """Return a view of a buffer after a call, or of any memory if the process keeps none of this form."""
        if spec == self._specs[number]:
            return self._output(number, spec, location)
        self.form.unkept.add(number)
        expected = self._specs[number]
        return torch.empty((), dtype=expected.dtype, device=self._device).expand(expected.shape)

    def _output(self, i: int, spec: TensorSpec, location: Location) -> Output:
        try:
            if 0 in spec.shape:
                return torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
            if location.where is Where.INPUT and location.index < len(self._inputs):
                view = view_within(self._inputs[location.index].flat, location, spec)
                # A gradient can be the upstream gradient itself.
                if self.form.output_aliases[i] == location.index or self.form.is_gradient(i):
                    return view
                message = f"{output_name(i, self.form.paths)} is input {location.index} or a view of it, and the"
                message += " reference's has its own memory: return a new tensor, and leave the input unchanged"
                raise _wrong(Category.WRONG_OUTPUT_STRUCTURE, message, output=i, input=location.index)
            return own_memory(self.process, spec, location)
        except LocationError as error:
            message = f"the process answered with {error}"
            raise EvaluationEnded(Category.SANDBOX_VIOLATION, message, self.process.phase) from None

    def blanks(self) -> list[torch.Tensor]:
        """Return uninitialized memory of the judge for one call's outputs."""
        return [torch.empty(spec.shape, dtype=spec.dtype, device=self._device) for spec in self._specs]

    def read(self, views: Sequence[Output]) -> list[torch.Tensor]:
        """Return readable outputs: views on a GPU, copies in the judge's own memory on a CPU."""
        return [copied(view) if isinstance(view, OwnOutput) else view for view in views]

    def settle(self) -> None:
        """Wait until the judge's own work on the device has finished."""
        if self._device == "cuda":
            torch.cuda.synchronize()


class Candidate(Exchange):
    """A candidate, from its opening to its last checked call.

    Attributes:
        setup_ms: time in milliseconds of the model's setup(), or None if it declares none.
        activities: the GPU activities of the profiled call, as reported by the candidate, or None.
    """

    def __init__(
        self, process: SealedProcess, opening: int | None, job: Job, form: Form, settings: Settings, device: str
    ) -> None:
        """Use a process, which knows nothing of the kernel, without waiting for its order ``opening``.

        ``opening`` is None if the process has imported the kernel for another shape.
        """
        super().__init__(process, form, device)
        self.activities: list[Activity] | None = None
        self.setup_ms: float | None = None
        self._opening = opening
        self._job = job
        self._settings = settings
        self._deadlines: Deadlines = settings.deadlines

    def construct(
        self, init_inputs: list[Any] | dict[str, Any] | tuple[Any, ...], case: Case, plan: Plan, *, warm_up: bool
    ) -> None:
        """Import the source unless the process has, construct the model and share filled inputs.

        ``warm_up`` is True to compile the first call's code now, while the device is not exclusive.

        Raises:
            ForkServerError: the process could not open the device. None of the kernel's code has run.
        """
        if self._opening is not None:
            await_opening(self.process, self._opening)
        self.process.enter(Phase.LOAD, self._deadlines.load_s)
        self.process.order(Order.ALLOW, payload=plan.candidate)
        if self._opening is not None:
            self.process.order(Order.LOAD, payload=self._job)
        self.process.enter(Phase.CONSTRUCT, self._deadlines.construct_s)
        self.process.order(Order.CONSTRUCT, payload=init_inputs)
        self.setup_ms = self.set_up(case.inputs)
        self.bind_inputs(case.inputs)
        if warm_up:
            self.process.enter(Phase.COMPILE, self._deadlines.compile_s)
            self.process.order(Order.WARM_UP)
        if self._device == "cuda" and self._settings.timing.enabled:
            self.process.share_flags()

    def renewed(self, seed: int) -> Candidate:
        """Return the process without its model, for one with weights of another seed.

        Raises:
            EvaluationEnded: the process has died, or did not free its memory in time.
        """
        self.unbind()
        self.process.enter(Phase.CONSTRUCT, self._deadlines.construct_s)
        self.process.order(Order.REST, seed=seed)
        self.process.imports.close()
        self.process.allow_compilers(self._deadlines.compile_s)
        return Candidate(self.process, None, replace(self._job, seed=seed), self.form, self._settings, self._device)

    def prepare_calls(self, specs: Sequence[TensorSpec], forward_s: float) -> None:
        """Begin the check phase and send the form of the outputs. ``forward_s`` is the time of the reference's forward.

        If the GPU's work for a call takes too long, the phase ends at once, because other slots wait for the GPU.
        """
        deadlines = self._deadlines
        self.process.enter(Phase.CHECK, deadlines.check_s, max(deadlines.gpu_s, _SLOWEST * forward_s))
        self.bind_outputs(specs)

    def answer(self, case: Case) -> list[torch.Tensor]:
        """Make one call on a case, and return its outputs. Raise EvaluationEnded if it failed."""
        self.load(case.inputs)
        self.settle()
        return self.read(self.outputs(self.process.order(Order.RUN, promptly=self._device == "cuda", seed=case.seed)))

    def profile(self, case: Case) -> None:
        """Record the GPU activities of one call.

        Raises:
            NotRecorded: the candidate reported nothing, or nothing readable.
            EvaluationEnded: the candidate died while it was profiled.
        """
        self.process.enter(Phase.CHECK, self._deadlines.check_s)
        self.load(case.inputs)
        self.settle()
        page = memory("kqueue-profile", activities.SIZE)
        try:
            self.process.order(Order.PROFILE, fds=(page,))
            self.activities = activities.decode(os.pread(page, activities.SIZE, 0))
        finally:
            os.close(page)


def await_opening(process: SealedProcess, opening: int) -> None:
    """Wait until a process has opened the device.

    Raises:
        ForkServerError: the process could not open it. No foreign code has run.
    """
    process.enter(Phase.PREPARE, PREPARE_S)
    process.start_clock()
    try:
        process.receive(opening)
    except EvaluationEnded as ended:
        log = process.ended.log if process.ended is not None else ""
        raise ForkServerError(f"a sealed process could not open the device: {ended}\n{log}".rstrip()) from None
    process.stop_clock()


def own_memory(process: SealedProcess, spec: TensorSpec, location: Location) -> Output:
    """Return a tensor in a process's own memory.

    Raises:
        LocationError: the reported location is impossible.
    """
    if location.where is Where.OWN and process.memory is not None:
        if spec.dtype is None or not is_dense(spec.shape, location.stride):
            raise LocationError("a tensor of an impossible layout")
        return OwnOutput(process, location.offset, spec.shape, location.stride, spec.dtype)
    if location.where is Where.EXPORTED and process.memory is None:
        return process.imports.view(location, spec)
    raise LocationError("a tensor that was not delivered")


def _place(view: Output) -> Any:
    """Return an array at the place of a tensor, to compare places. Its values must not be used."""
    size, claimed = view.dtype.itemsize, view.address if isinstance(view, OwnOutput) else view.data_ptr()
    form = {"version": 3, "shape": tuple(view.shape), "strides": tuple(size * step for step in view.stride())}
    place = {"typestr": f"|V{size}", "data": (1 + claimed % (1 << 62), True)}  # numpy raises an error for address 0.
    return np.asarray(SimpleNamespace(__array_interface__=form | place))


def copied(own: OwnOutput) -> torch.Tensor:
    """Return a copy of a tensor in a process's own memory."""
    copy = torch.empty(own.shape, dtype=own.dtype)
    own.read(copy)
    return copy


def copy_out(views: Sequence[Output], into: list[torch.Tensor]) -> None:
    """Copy outputs into the judge's own memory in random order, on a GPU without waiting for it.

    Raises:
        EvaluationEnded: the memory does not exist, on a CPU only.
    """
    for view, copy in _shuffled(zip(views, into, strict=True)):
        if isinstance(view, OwnOutput):
            view.read(copy)
        else:
            copy.copy_(view)


def _shuffled(pairs: Iterable[_Pair]) -> list[_Pair]:
    """Return pairs in random order, because a kernel could work while the last one is copied."""
    chosen = list(pairs)
    _RANDOM.shuffle(chosen)
    return chosen


def check_form(reply: Reply, form: Form, specs: Sequence[TensorSpec]) -> None:
    """Raise EvaluationEnded with the first difference from the form of the reference's outputs.

    An output of another shape has no gradients, so they can be missing.
    """
    got = list(reply.tensors)
    least = len(specs) - len(form.gradient_names)
    if reply.structure != form.structure or not least <= len(got) <= len(specs):
        raise _wrong(
            Category.WRONG_OUTPUT_STRUCTURE,
            f"the output is {reply.structure}, the reference's is {form.structure}",
            structure=reply.structure,
        )
    names = [output_name(i, form.paths) for i in range(len(specs))]
    specs = specs[: len(got)]
    for i, (mine, theirs) in enumerate(zip(specs, got, strict=True)):
        if mine.shape != theirs.shape:
            raise _wrong(Category.WRONG_SHAPE, f"{names[i]} has shape {theirs.shape}, not {mine.shape}", output=i)
    for i, (mine, theirs) in enumerate(zip(specs, got, strict=True)):
        if mine.dtype != theirs.dtype:
            dtype = theirs.dtype or "that the judge cannot compare"
            raise _wrong(Category.WRONG_DTYPE, f"{names[i]} has dtype {dtype}, not {mine.dtype}", output=i)
    for i, (mine, theirs) in enumerate(zip(specs, got, strict=True)):
        if mine.device != theirs.device:
            raise _wrong(Category.WRONG_DEVICE, f"{names[i]} is on {theirs.device}, not {mine.device}", output=i)
    raise _wrong(Category.WRONG_OUTPUT_STRUCTURE, "the output could not be copied", structure=reply.structure)


def _wrong(category: Category, message: str, **facts: Any) -> EvaluationEnded:
    return EvaluationEnded(category, message, Phase.CHECK, **facts)
