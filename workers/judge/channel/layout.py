"""The layout of inputs: strides, views of larger memory, expanded dimensions, and memory that several inputs share.

Processes exchange only dense tensors. So inputs are sent as *roots* and :class:`.View` objects. The root of a dense
tensor is the tensor itself. Other inputs are views of a root in one dimension, one for all that share memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch

from workers.judge.channel.buffers import is_apart, is_dense
from workers.judge.channel.tensors import DTYPES, MAX_DIMS, TensorSpec, View

#: Size in bytes up to which a root can be larger than four times its views. Beyond it views become dense.
_ROOT_BYTES: Final = 64 << 20


def refusal(tensor: torch.Tensor) -> str:
    """Return why a tensor cannot be an input, or an empty string."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested (jagged)" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        return f"a {kind} tensor. Only dense and strided tensors can be shared: return its component tensors"
    if tensor.dtype not in DTYPES:
        reason = (
            "a quantized tensor has a scale besides its values"
            if tensor.is_quantized
            else "torch has no arithmetic for it"
        )
        return f"a tensor of {tensor.dtype}, which cannot be shared: {reason}. View it as a dtype with arithmetic"
    if tensor.dim() > MAX_DIMS:
        return f"a tensor of {tensor.dim()} dimensions, and at most {MAX_DIMS} are possible"
    return ""


def taken_apart(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[View]]:
    """Return the roots of tensors, and the tensors as views of them. A root can be one of the tensors."""
    groups: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        is_shared = tensor.numel() > 0
        key = (tensor.untyped_storage().data_ptr(), tensor.device, tensor.dtype) if is_shared else i
        groups.setdefault(key, []).append(i)
    roots: list[torch.Tensor] = []
    views: dict[int, View] = {}
    for members in groups.values():
        begin = min(int(tensors[i].storage_offset()) for i in members)
        group = [
            View(len(roots), int(tensors[i].storage_offset()) - begin, tuple(tensors[i].shape), tensors[i].stride())
            for i in members
        ]
        nbytes = tensors[members[0]].itemsize * max(view.offset + view.extent for view in group)
        is_small = nbytes <= max(_ROOT_BYTES, 4 * sum(tensors[i].nbytes for i in members))
        if is_small and (len(members) > 1 or not _is_dense(tensors[members[0]])):
            roots.append(_root_of([tensors[i] for i in members], group))
            views |= zip(members, group, strict=True)
            continue
        for i in members:
            root = tensors[i] if _is_dense(tensors[i]) else tensors[i].contiguous()
            views[i] = View(len(roots), 0, tuple(root.shape), root.stride())
            roots.append(root)
    return roots, [views[i] for i in range(len(tensors))]


def _root_of(tensors: Sequence[torch.Tensor], views: Sequence[View]) -> torch.Tensor:
    """Return the memory of tensors in one dimension. Gaps between their values are zero, so that draws agree."""
    first = tensors[0]
    begin = min(tensor.storage_offset() for tensor in tensors)
    size = max(view.offset + view.extent for view in views)
    memory = first.as_strided((size,), (1,), begin)
    root = torch.zeros(size * first.itemsize, dtype=torch.uint8, device=first.device).view(first.dtype)
    for view in views:
        # One index of an expanded dimension reaches all of its memory.
        shape = [1 if step == 0 else n for n, step in zip(view.shape, view.stride, strict=True)]
        if is_apart(shape, view.stride):
            source = memory.as_strided(shape, view.stride, begin + view.offset)
            root.as_strided(shape, view.stride, view.offset).copy_(source)
        else:
            part = slice(view.offset, view.offset + view.extent)
            root[part] = memory[part]
    return root


def put_back(
    roots: Sequence[torch.Tensor], views: Sequence[View], *, differentiates: bool = False
) -> list[torch.Tensor]:
    """Return the inputs as views of their roots, with ``requires_grad`` as in the problem if it is wanted."""
    inputs = [
        roots[view.root].as_strided(view.shape, view.stride, roots[view.root].storage_offset() + view.offset)
        for view in views
    ]
    for tensor, view in zip(inputs, views, strict=True):
        if differentiates and view.requires_grad:
            tensor.requires_grad_()
    return inputs


def checked(encoded: Any, roots: Sequence[TensorSpec]) -> tuple[View, ...]:
    """Return views from untrusted values. Raise ValueError if a view is malformed or exceeds its root."""
    views = tuple(View(*fields) for fields in encoded if len(fields) == len(View._fields))
    for view in views:
        numbers = (view.root, view.offset, *view.shape, *view.stride)
        if type(view.requires_grad) is not bool or any(
            type(number) is not int or not 0 <= number < 1 << 48 for number in numbers
        ):
            raise ValueError("a view of impossible numbers")
        if len(view.shape) != len(view.stride) or len(view.shape) > MAX_DIMS or view.root >= len(roots):
            raise ValueError("a view of an impossible form")
        if view.offset + view.extent > math.prod(roots[view.root].shape):
            raise ValueError("a view beyond its root")
    if len(views) != len(encoded):
        raise ValueError("a view of an impossible form")
    return views


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 0 or is_dense(tensor.shape, tensor.stride())
