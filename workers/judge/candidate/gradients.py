"""Gradients of a call, in a sealed process: the model runs in grad mode, then autograd goes backward.

The upstream gradients are further inputs of the call, and the gradients further outputs. The judge exchanges, compares
and times them like all inputs and outputs. A kernel can change this code in its own process, but not the comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch.utils._pytree import tree_map_only

from workers.judge.channel.arguments import put_together
from workers.judge.channel.orders import Gradients
from workers.judge.channel.tensors import TensorSpec, describe

#: Dtypes of the inputs that need gradients, if the problem marks none by ``requires_grad``.
_DIFFERENTIABLE: Final = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
_FUNCTION: Final = (
    "wrap the kernel in a torch.autograd.Function whose backward returns a gradient for each input, or None where its"
    " output does not depend on the input"
)


class GradientError(Exception):
    """A kernel does not have the reference's gradients. The message states the necessary change."""


@dataclass(frozen=True, slots=True)
class Differentiated:
    """The outputs of a call, and its gradients after them, without their graph."""

    structure: str
    tensors: list[torch.Tensor]


def described(output: Any) -> tuple[str, list[torch.Tensor]]:
    """Return the structure of an output, and its tensors in order, with the gradients if they were computed."""
    return (output.structure, output.tensors) if type(output) is Differentiated else describe(output)


def marks(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Return for each input if it needs a gradient: those that the problem marks, or else all floating-point ones."""
    marked = [tensor.requires_grad for tensor in tensors]
    return marked if any(marked) else [tensor.dtype in _DIFFERENTIABLE for tensor in tensors]


def weights_by_name(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's parameters by name, without the name of torch.compile's wrapper."""
    return {name.replace("_orig_mod.", ""): one for name, one in torch.nn.Module.named_parameters(model)}


def prepared(
    model: torch.nn.Module, wanted: Gradients | None, arrangement: Any, tensors: Sequence[torch.Tensor], steps: int = 1
) -> Callable[[], Any]:
    """Return a function that makes one call with new lists and dicts, and with its gradients if some are wanted.

    It returns the outputs of several steps by name, as copies that later steps cannot change.
    """
    upstream: Sequence[torch.Tensor] = ()
    if wanted is not None and wanted.outputs:
        arrangement, count = arrangement[0], len(tensors) - len(wanted.outputs)
        tensors, upstream = tensors[:count], tensors[count:]
    positional, keywords = put_together(arrangement, tensors)
    if steps > 1:
        copied = partial(tree_map_only, torch.Tensor, torch.Tensor.clone)
        return lambda: {
            f"call {number}": (copied if number < steps else list)([model(*positional, **keywords)])[0]
            for number in range(1, steps + 1)
        }
    if wanted is None:
        return lambda: model(*positional, **keywords)
    sources = [*(tensor for tensor in tensors if tensor.requires_grad), *_weights(model, wanted)]
    return partial(_differentiated, lambda: model(*positional, **keywords), wanted, sources, upstream)


def _weights(model: torch.nn.Module, wanted: Gradients) -> list[torch.Tensor]:
    """Return the parameters of a model that correspond to the reference's, by name or else by position."""
    named = weights_by_name(model)
    own = list(named.values())
    is_alike = [tuple(one.shape) for one in own] == [shape for _, shape in wanted.weights]
    found: list[torch.Tensor] = []
    for position, (name, shape) in enumerate(wanted.weights):
        one = named[name] if name in named else own[position] if is_alike else None
        if one is None or tuple(one.shape) != shape or not one.requires_grad:
            has = "none" if one is None else f"one of shape {list(one.shape)}, requires_grad={one.requires_grad}"
            raise GradientError(
                f"the reference has a gradient of the parameter {name} of shape {list(shape)}, and ModelNew has {has}:"
                " give ModelNew the parameters of Model, by the same names or all of them in the same order"
            )
        found.append(one)
    return found


def _differentiated(
    forward: Callable[[], Any], wanted: Gradients, sources: Sequence[torch.Tensor], upstream: Sequence[torch.Tensor]
) -> Differentiated:
    with torch.enable_grad():
        structure, leaves = describe(forward())
        outputs = [leaf.detach() for leaf in leaves]
        shapes = [leaves[number].shape if number < len(leaves) else None for number in wanted.outputs]
        # Outputs of another form have no gradients, and the judge reports the form.
        if not upstream or shapes != [tensor.shape for tensor in upstream]:
            return Differentiated(structure, outputs)
        for number in wanted.outputs:
            if not leaves[number].requires_grad:
                raise GradientError(
                    f"output {number} has no grad_fn, and the reference's has one: {_FUNCTION}. If forward"
                    " computes a gradient itself, that backward must be differentiable too, by operations of autograd"
                )
        found = _gradients([leaves[number] for number in wanted.outputs], sources, upstream)
    for number in (*wanted.delivered, *wanted.absent):
        one = found[number]
        got, expected = None if one is None else describe(one)[0], None if number in wanted.absent else "Tensor"
        if got != expected:
            raise GradientError(
                f"the gradient of {wanted.names[number]} is {got}, and the reference's is {expected}: {_FUNCTION}"
            )
    return Differentiated(structure, [*outputs, *(found[number] for number in wanted.delivered)])


def _gradients(
    roots: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], upstream: Sequence[torch.Tensor]
) -> tuple[Any, ...]:
    # torch.autograd.grad imports sympy at its first call, which takes 4 s of CPU time, to compare shapes.
    variable: Any = torch.autograd.Variable
    return variable._execution_engine.run_backward(
        tuple(roots), tuple(upstream), False, False, tuple(sources), allow_unreachable=True, accumulate_grad=False
    )


def is_movable(tensor: torch.Tensor) -> bool:
    """Return whether torch can draw random values in place of a tensor's."""
    return tensor.is_floating_point() and tensor.itemsize > 1 and tensor.numel() > 0


def gates(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters that are all zero and no bias, by name. Their zeros hide other weights."""
    named = {name: one for name, one in weights_by_name(model).items() if not name.endswith("bias")}
    return {name: one for name, one in named.items() if is_movable(one) and not bool(one.any())}


def without_effect(model: torch.nn.Module, arrangement: Any, tensors: Sequence[torch.Tensor]) -> list[str]:
    """Call a reference, and return the parameters that gates hide: the outputs' gradients by them are exactly zero."""
    weights = {name: one for name, one in weights_by_name(model).items() if one.requires_grad}
    if not gates(model):
        return []
    positional, keywords = put_together(arrangement, tensors)
    with torch.enable_grad():
        roots = [leaf for leaf in describe(model(*positional, **keywords))[1] if leaf.requires_grad]
        found = _gradients(roots, [*weights.values()], list(map(torch.randn_like, roots))) if roots else ()
    return [name for name, one in zip(weights, found, strict=False) if one is not None and not bool(one.any())]


def learned(
    model: torch.nn.Module, arrangement: Any, tensors: Sequence[torch.Tensor], inputs: Sequence[str] = ()
) -> tuple[Gradients, list[TensorSpec]]:
    """Call a reference, and return its gradients and the forms of upstream gradients. ``inputs`` are names."""
    weights = {name: one for name, one in weights_by_name(model).items() if one.requires_grad}
    sources = [*(tensor for tensor in tensors if tensor.requires_grad), *weights.values()]
    positional, keywords = put_together(arrangement, tensors)
    with torch.enable_grad():
        leaves = dict(enumerate(describe(model(*positional, **keywords))[1]))
        roots = {number: leaf for number, leaf in leaves.items() if leaf.requires_grad}
        found = (
            _gradients([*roots.values()], sources, list(map(torch.ones_like, roots.values())))
            if roots and sources
            else ()
        )
    return Gradients(
        names=(*inputs, *(f"weight {name}" for name in weights)),
        weights=tuple((name, tuple(one.shape)) for name, one in weights.items()),
        outputs=tuple(roots),
        delivered=tuple(number for number, one in enumerate(found) if one is not None),
        absent=tuple(number for number, one in enumerate(found) if one is None),
    ), list(map(TensorSpec.of, roots.values()))


def upstream(spec: TensorSpec) -> torch.Tensor:
    """Draw the upstream gradient of an output."""
    assert spec.dtype is not None
    return torch.randn(spec.shape, dtype=spec.dtype if spec.dtype.is_complex else torch.float32).to(spec.dtype)
