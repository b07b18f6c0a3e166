"""The harness of a reference: a problem's source, which draws inputs and answers them.

Source of the problem's form: KernelBench (``class Model``, ``get_inputs()``, ``get_init_inputs()``).
"""

from __future__ import annotations

import contextlib
import copy
import mmap
import random
import sys
import traceback
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Final, cast

import torch

from workers.judge.candidate.harness import Harness, Instance, ProblemError
from workers.judge.candidate.variants import Variants
from workers.judge.channel import sheet
from workers.judge.channel.arguments import FORM, ArgumentsError, take_apart
from workers.judge.channel.buffers import OpenedBuffer
from workers.judge.channel.protocol import MAX_DIMS, MAX_TENSORS, Answer, Command, Draw, Order, Reply, TensorSpec
from workers.judge.channel.randomness import set_seed

#: What torch may keep of a GPU's memory for later, in bytes: others need some too.
_CACHED_BYTES: Final = 1 << 30


class ReferenceHarness(Harness):
    """One problem, from its source to its answers."""

    def __init__(self, page: memoryview[int], directory: Path | None = None) -> None:
        super().__init__(page, directory)
        self._sheet: mmap.mmap
        self._get_inputs: Any
        self._get_init_inputs: Any
        self._drawn: list[torch.Tensor] = []
        self._variants: Variants | None = None
        #: The model in float64 on inputs in float64.
        self._wide = Instance()
        self.orders |= {
            Order.INITIAL: self._initial,
            Order.DRAW: self._draw,
            Order.TAKE: self._take,
            Order.DELIVER: self._deliver_again,
            Order.WIDEN: self._widen,
            Order.RUN: self._answer,
            Order.REST: self._rest,
        }

    def instance(self, command: Command) -> Instance:
        """Return the model that a command means."""
        return self._wide if command.wide else self.own

    def take_module(self, module: Any) -> None:
        """Find the functions of a problem beside its model."""
        if not isinstance(getattr(module, "Model", None), type) or not issubclass(module.Model, torch.nn.Module):
            raise ProblemError("the problem defines no class Model derived from torch.nn.Module")
        super().take_module(module)
        self._get_inputs = getattr(module, "get_inputs", None)
        self._get_init_inputs = getattr(module, "get_init_inputs", None)
        if not callable(self._get_inputs):
            raise ProblemError("the problem defines no function get_inputs()")

    def _initial(self, command: Command) -> Reply:
        [descriptor] = command.descriptors
        self._sheet = mmap.mmap(descriptor, sheet.SIZE)
        torch.manual_seed(self._job.seed)
        arguments = self._get_init_inputs() if callable(self._get_init_inputs) else []
        if isinstance(arguments, dict):
            arguments = dict(cast("dict[str, Any]", arguments))
        elif isinstance(arguments, (list, tuple)):
            arguments = list(cast("list[Any]", arguments))
        else:
            raise ProblemError("get_init_inputs() must return a list, or a dict of keyword arguments")
        self._tell(arguments, "get_init_inputs()")
        return self.done(command)

    def _draw(self, command: Command) -> Reply:
        """Draw input sets. Seeds of all generators are the judge's; ``numpy`` counts only where it is used."""
        order: Draw = command.payload
        sets = [self.own.inputs, *self.own.more]
        form: Any = None
        varied: list[bool] = []
        specs: tuple[TensorSpec, ...] = ()
        for seed, kind, shared in zip_longest(order.seeds, order.kinds, sets[: len(order.seeds)]):
            if kind is not None:
                varied.append(self._vary(seed, kind, shared, on_device=order.on_device))
                continue
            now, self._drawn = self._inputs(seed, on_device=order.on_device)
            specs = tuple(TensorSpec.of(tensor) for tensor in self._drawn)
            if form is None:
                form = now
                self._tell(now, "get_inputs()")
            elif repr(now) != repr(form):
                raise ProblemError("get_inputs() must return the same shapes, dtypes and scalars each time")
            if shared is None or specs != tuple(TensorSpec.of(opened.tensor) for opened in shared):
                return Reply(Answer.MISMATCH, command.sequence, tensors=specs)
            for opened, drawn in zip(shared, self._drawn, strict=True):
                opened.tensor.copy_(drawn)
        if order.kinds:
            self._tell(varied, "get_inputs()")
        self._drawn = []
        self.settle()
        return Reply(Answer.DONE, command.sequence, tensors=specs)

    def _vary(self, seed: int, kind: str, shared: list[OpenedBuffer], *, on_device: bool) -> bool:
        """Make a variant of the inputs of a seed; return whether there is one. What fails was not written for it."""
        try:
            if self._variants is None:
                self._variants = Variants(lambda seed: self._inputs(seed, on_device=on_device)[1], seed, seed ^ 1)
            made = self._variants.make(kind)
            if made is None or [TensorSpec.of(t) for t in made] != [TensorSpec.of(o.tensor) for o in shared]:
                return False
            for opened, drawn in zip(shared, made, strict=True):
                opened.tensor.copy_(drawn)
            self.settle()
        except Exception:  # noqa: BLE001 -- the problem's code may raise anything
            traceback.print_exc()
            return False
        return True

    def _inputs(self, seed: int, *, on_device: bool) -> tuple[Any, list[torch.Tensor]]:
        """Return the arrangement of a call's arguments, and the tensors among them as calls get them."""
        set_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        with torch.device(self._job.device) if on_device else contextlib.nullcontext():
            values = self._get_inputs()
        try:
            arrangement, tensors = take_apart(values)
        except ArgumentsError as error:
            raise ProblemError(f"{FORM}; it returned {error}") from None
        if len(tensors) > MAX_TENSORS or any(t.dim() > MAX_DIMS or t.layout is not torch.strided for t in tensors):
            raise ProblemError(f"at most {MAX_TENSORS} dense input tensors of {MAX_DIMS} dimensions and known dtypes")
        return arrangement, [self.place(tensor) for tensor in tensors]

    def _take(self, command: Command) -> Reply:
        for opened, drawn in zip(self.own.inputs, self._drawn, strict=True):
            opened.tensor.copy_(drawn)
        self._drawn = []
        self.settle()
        return self.done(command)

    def _answer(self, command: Command) -> Reply:
        """One call, on the shared inputs; tells whether it drew random numbers."""
        own = self.instance(command)
        positional, keywords = own.arguments()
        with _default_dtype(torch.float64) if command.wide else contextlib.nullcontext(), torch.no_grad():
            set_seed(command.seed)
            before = self._random_state()
            output = own.model(*positional, **keywords)
            self.settle()
            drew = not torch.equal(before, self._random_state())
        reply = self._told(command, output, drew=drew)
        if command.wide and self.on_gpu:
            unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            if unused > _CACHED_BYTES:
                torch.cuda.empty_cache()
        return reply

    def _deliver_again(self, command: Command) -> Reply:
        return self._told(command, self.instance(command).last, drew=False)

    def _told(self, command: Command, output: Any, *, drew: bool) -> Reply:
        reply = self.deliver(command, output)
        self.settle()
        written = 0 if command.wide else self._written(output)
        return Reply(
            reply.answer,
            reply.sequence,
            structure=reply.structure,
            tensors=reply.tensors,
            places=reply.places,
            drew=drew,
            written_bytes=written,
        )

    def _written(self, output: Any) -> int:
        """Return the bytes of outputs that are neither inputs nor weights, each memory counted once."""
        model: torch.nn.Module = self.own.model
        kept = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        kept |= {begin for begin, _ in self.own.input_memory}
        sizes: dict[int, int] = {}
        for leaf in _tensors(output):
            storage = leaf.untyped_storage()
            if storage.data_ptr() not in kept:
                where = storage.data_ptr()
                sizes[where] = max(sizes.get(where, 0), min(leaf.nbytes, storage.nbytes()))
        return sum(sizes.values())

    def _widen(self, command: Command) -> Reply:
        """Copy the model and make all its numbers float64, those that are plain attributes too."""
        with torch.no_grad():
            wide = copy.deepcopy(self.own.model).double()
            for module in wide.modules():
                for name, value in vars(module).items():
                    if isinstance(value, torch.Tensor) and value.is_floating_point():
                        setattr(module, name, value.double())
            self.settle()
        self._wide.model = wide
        return self.done(command)

    def _rest(self, command: Command) -> Reply:
        """Forget the evaluation: its buffers, its model, its last tensors."""
        self._drawn, self._variants = [], None
        for instance in (self.own, self._wide):
            self.unbind([*instance.inputs, *chain.from_iterable(instance.more)])
        self.own, self._wide = Instance(), Instance()
        if self.on_gpu:
            self.exports.forget()
            torch.cuda.empty_cache()
        return self.done(command)

    def _random_state(self) -> torch.Tensor:
        """Return what changes when a call draws random numbers."""
        state = torch.get_rng_state()
        return torch.cat((state, torch.cuda.get_rng_state())) if self.on_gpu else state

    def _tell(self, value: Any, what: str) -> None:
        try:
            data = sheet.encode(value)
        except sheet.SheetError as error:
            raise ProblemError(f"{what} returned {error}; numbers, strings, tensors and their lists travel") from None
        self._sheet[: len(data)] = data


def _tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(cast("dict[Any, Any]", output).values())
    if isinstance(output, (list, tuple)):
        return [tensor for item in cast("list[Any]", output) for tensor in _tensors(item)]
    return []


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Any:
    """Have torch make numbers of this dtype meanwhile."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
