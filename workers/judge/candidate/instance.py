"""A model in a sealed process, with the inputs and outputs of its calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard, cast

import torch

from workers.judge.candidate import gradients
from workers.judge.channel.buffers import OpenedBuffer
from workers.judge.channel.layout import put_back
from workers.judge.channel.orders import BufferSpec, Gradients
from workers.judge.channel.tensors import TensorSpec, View, describe


def _parts_of(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that holds a module's parts, which is another one for classes derived from ScriptModule."""
    return vars(module).get("_actual_script_module", module)


def modules_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return a model's modules. Its own attributes can hide the method of that name."""
    found: dict[int, torch.nn.Module] = {}
    left = [model]
    while left:
        module = _parts_of(left.pop())
        if id(module) not in found:
            found[id(module)] = module
            left += [child for child in vars(module)["_modules"].values() if child is not None]
    return list(found.values())


def weights_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return a model's dense parameters and buffers that have values. Its attributes can hide the methods for these."""
    held = [vars(module)[kind] for module in modules_of(model) for kind in ("_parameters", "_buffers")]
    every = {id(tensor): tensor for some in held for tensor in some.values() if tensor is not None}.values()
    return [each for each in every if each.layout is torch.strided and not torch.nn.parameter.is_lazy(each)]


def state_of(model: torch.nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """Return where a model holds its buffers and parameters: by full name, a module's dict and the key there."""
    found: dict[str, tuple[dict[str, Any], str]] = {}
    seen: set[int] = set()
    left = [("", model)]
    while left:
        prefix, module = left.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        held = vars(_parts_of(module))
        for some in (held["_buffers"], held["_parameters"]):
            found |= {prefix + key: (some, key) for key, _ in some.items()}
        # torch.compile wraps a model in a module of this name.
        children = [
            (prefix if key == "_orig_mod" else f"{prefix}{key}.", child) for key, child in held["_modules"].items()
        ]
        left += [(path, child) for path, child in children if child is not None]
    return found


def value_of(held: dict[str, Any], key: str) -> Any:
    """Return a buffer or parameter of a module, or None. TorchScript's dicts have no method ``get``."""
    return dict(held.items()).get(key)


def is_plain(tensor: Any) -> TypeGuard[torch.Tensor]:
    """Return whether an object is a dense tensor of no other class that contains values."""
    return isinstance(tensor, torch.Tensor) and bool(describe(tensor)[1]) and tensor.numel() > 0


@dataclass(slots=True)
class Instance:
    """One model, with the inputs and outputs of its calls.

    Attributes:
        arrangement: arrangement of ``forward``'s arguments.
        views: the tensors among the arguments, as views of ``inputs``.
        differentiates: whether ``forward`` is called in grad mode.
        gradients: the gradients that each call computes, or None for none.
        steps: number of forwards in a call, without a reset between them.
        input_memory: address and size in bytes of each input of the last call.
        structure: arrangement of the reference's outputs (:func:`~workers.judge.channel.tensors.describe`).
        forms: forms of the reference's outputs.
        lasting: numbers of the outputs that the reference returns from memory of its model.
        last: outputs of the last call.
        made: output tensors of the last call that are no views of inputs, by output number.
        delivered: delivered output tensors, kept until the judge has read them.
        parameters: addresses of the memory of the model's parameters.
        spared: checksums of outputs in that memory, by address.
        dense: dense copies of the last call's non-dense outputs on a CPU, by output number.
        resets: names of the buffers and parameters that are reset before each call.
        compared: number of the first of them that are delivered.
        kept: for each of them, where the model holds it, and its initial values. None if the model has none.
    """

    model: Any = None
    arrangement: Any = None
    views: tuple[View, ...] = ()
    differentiates: bool = False
    gradients: Gradients | None = None
    steps: int = 1
    inputs: list[OpenedBuffer] = field(default_factory=list[OpenedBuffer])
    input_memory: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    structure: str = ""
    forms: tuple[BufferSpec, ...] = ()
    lasting: tuple[int, ...] = ()
    last: Any = None
    made: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    delivered: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    parameters: set[int] = field(default_factory=set[int])
    spared: dict[int, int] = field(default_factory=dict[int, int])
    dense: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    resets: tuple[str, ...] = ()
    compared: int = 0
    kept: list[tuple[dict[str, Any], str, torch.Tensor] | None] = field(default_factory=list[Any])

    def watch(self, resets: tuple[str, ...], compared: int, initial: dict[str, torch.Tensor] | None = None) -> None:
        """Reset buffers and parameters before each call from now on: to ``initial`` or their present values."""
        self.resets, self.compared, self.kept = resets, compared, []
        places = state_of(self.model) if resets else {}
        for name in resets:
            held, key = places.get(name, ({}, ""))
            value = value_of(held, key) if initial is None else initial[name]
            self.kept.append((held, key, value.detach().clone()) if is_plain(value) else None)

    def reset(self) -> None:
        """Reset what the reference's forward changes in its model, so that each call finds the same values."""
        with torch.no_grad():
            for held, key, initial in filter(None, self.kept):
                now = value_of(held, key)
                if is_plain(now) and not now.is_inference() and TensorSpec.of(now) == TensorSpec.of(initial):
                    now.copy_(initial)
                else:
                    held[key] = initial.clone()

    def constant_state(self) -> dict[str, torch.Tensor]:
        """Return the initial values that are one number each, by the names of buffers and parameters."""
        kept = {name: one[2] for name, one in zip(self.resets, self.kept, strict=True) if one is not None}
        return {name: one for name, one in kept.items() if gradients.is_movable(one) and bool(one.min() == one.max())}

    def buffers(self) -> list[Any]:
        """Return the buffers to deliver, with None for each that the model does not have."""
        return [None if kept is None else value_of(*kept[:2]) for kept in self.kept[: self.compared]]

    def find_parameters(self) -> None:
        """Find the memory of the model's parameters, which can change in each call."""
        weights = [weight for weight in weights_of(self.model) if isinstance(weight, torch.nn.Parameter)]
        self.parameters = {weight.untyped_storage().data_ptr() for weight in weights}

    def forget(self) -> None:
        """Drop the last call's outputs, which the judge has read, so that the next call can reuse their memory."""
        self.last, self.delivered = None, []
        self.made.clear()
        self.dense.clear()

    def input_of(self, leaf: torch.Tensor) -> int | None:
        """Return the number of the input whose memory contains a tensor's first byte, or None."""
        at = leaf.data_ptr()
        for number, (begin, nbytes) in enumerate(self.input_memory):
            if begin <= at < begin + nbytes:
                return number
        return None

    def call(self, inputs: Sequence[torch.Tensor] | None = None) -> Callable[[], Any]:
        """Return a function that makes one call of the model, with ``inputs`` instead of the shared ones if given."""
        inputs = [one.tensor for one in self.inputs] if inputs is None else inputs
        self.input_memory = [(one.data_ptr(), one.nbytes) for one in inputs]
        tensors = put_back(inputs, self.views, differentiates=self.differentiates)
        return gradients.prepared(self.model, self.gradients, self.arrangement, tensors, self.steps)


def lasting_of(model: torch.nn.Module) -> set[int]:
    """Return the addresses of all memory of a model: weights, and tensors in attributes of its modules."""
    kept = weights_of(model)
    for module in modules_of(model):
        kept += tensors_in(list(vars(module).values()))
    return {tensor.untyped_storage().data_ptr() for tensor in kept}


def tensors_in(output: Any) -> list[torch.Tensor]:
    """Return the dense tensors in nested lists, tuples and dicts."""
    if isinstance(output, torch.Tensor):
        return [output] if output.layout is torch.strided else []
    if isinstance(output, dict):
        output = list(cast("dict[Any, Any]", output).values())
    if isinstance(output, (list, tuple)):
        return [tensor for item in cast("list[Any]", output) for tensor in tensors_in(item)]
    return []


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Generator[None]:
    """Put a model in ``eval()`` mode inside the ``with`` block."""
    before = [(module, module.training) for module in modules_of(model)]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Any:
    """Set torch's default dtype inside the ``with`` block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
