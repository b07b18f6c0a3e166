"""A model in a sealed process, with the inputs and outputs of its calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from workers.judge.channel.arguments import put_together
from workers.judge.channel.buffers import OpenedBuffer
from workers.judge.channel.layout import put_back
from workers.judge.channel.orders import BufferSpec
from workers.judge.channel.tensors import View


def modules_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return a model's modules. Its own attributes can hide the method of that name."""
    found: dict[int, torch.nn.Module] = {}
    left = [model]
    while left:
        module = left.pop()
        if id(module) not in found:
            found[id(module)] = module
            left += [child for child in vars(module)["_modules"].values() if child is not None]
    return list(found.values())


def weights_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return a model's parameters and buffers. Its own attributes can hide the methods of these names."""
    every = [vars(module)[kind] for module in modules_of(model) for kind in ("_parameters", "_buffers")]
    return list({id(tensor): tensor for some in every for tensor in some.values() if tensor is not None}.values())


@dataclass(slots=True)
class Instance:
    """One model, with the inputs and outputs of its calls.

    Attributes:
        arrangement: arrangement of ``forward``'s arguments.
        views: the tensors among the arguments, as views of ``inputs``.
        differentiates: whether ``forward`` is called in grad mode.
        input_memory: address and size in bytes of each input of the last call.
        structure: arrangement of the reference's outputs (:func:`~workers.judge.channel.tensors.describe`).
        forms: forms of the reference's outputs.
        lasting: numbers of the outputs that the reference returns from memory of its model.
        last: outputs of the last call.
        made: output tensors of the last call that are no views of inputs, by output number.
        delivered: delivered output tensors, kept until the judge has read them.
        dense: dense copies of the last call's non-dense outputs on a CPU, by output number.
    """

    model: Any = None
    arrangement: Any = None
    views: tuple[View, ...] = ()
    differentiates: bool = False
    inputs: list[OpenedBuffer] = field(default_factory=list[OpenedBuffer])
    input_memory: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    structure: str = ""
    forms: tuple[BufferSpec, ...] = ()
    lasting: tuple[int, ...] = ()
    last: Any = None
    made: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    delivered: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    dense: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])

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

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and keyword arguments of one call, with new lists and dicts for each call."""
        roots = [opened.tensor for opened in self.inputs]
        return put_together(self.arrangement, put_back(roots, self.views, differentiates=self.differentiates))
