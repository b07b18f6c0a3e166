"""The form and the location of a call's tensors in messages between the judge and a sealed process."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NamedTuple

import torch

#: Maximum number of tensors in an output.
MAX_TENSORS: Final = 32
#: Index of an output of a reference that shares memory with the model.
LASTING: Final = 255
#: Maximum number of dimensions of a tensor.
MAX_DIMS: Final = 8
#: Maximum length in bytes of the description of an output's structure (:func:`describe`).
MAX_STRUCTURE_BYTES: Final = 1024
#: Dtypes by their number in a message. The number 255 stands for any other dtype.
DTYPES: Final[tuple[torch.dtype, ...]] = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The form of a tensor: dtype (None for one that the protocol does not support), shape and device type."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    device: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """Return the spec of ``tensor``."""
        return cls(tensor.dtype if tensor.dtype in DTYPES else None, tuple(tensor.shape), tensor.device.type)


class View(NamedTuple):
    """An input: the number of its root, its offset there in elements, its shape and its strides."""

    root: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def extent(self) -> int:
        """Number of elements from the first to the last one."""
        return 0 if 0 in self.shape else 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))


class Where(IntEnum):
    """The memory that contains an output."""

    NOWHERE = 0
    """No memory, because the output could not be delivered, or is empty."""
    OWN = 1
    """The process's host memory, where the output is dense. Used on a CPU."""
    INPUT = 2
    """A shared input, of which the output is a view."""
    EXPORTED = 3
    """A run of allocations that the process has announced (:class:`Export`). Used on a GPU."""
    ARENA = 4
    """The arena that the judge shares with a reference."""


@dataclass(frozen=True, slots=True)
class Location:
    """The location of an output. From a candidate it is a claim.

    Attributes:
        where: the memory.
        index: for ``INPUT``, the shared input's number. For other outputs of a reference, 1 plus the number of the
            input whose memory the output shares, :data:`LASTING` for memory of the model, else 0.
        run: for ``EXPORTED``, the number of the run of allocations.
        offset: bytes from the beginning of the run, the input tensor or the arena. For ``OWN``, the address.
        stride: strides in elements.
    """

    where: Where = Where.NOWHERE
    index: int = 0
    run: int = 0
    offset: int = 0
    stride: tuple[int, ...] = ()


def describe(value: Any) -> tuple[str, list[Any]]:
    """Return the structure of an output as text, and its leaves in order.

    ``T`` is a dense tensor, exactly :class:`torch.Tensor` or :class:`torch.nn.Parameter`, without instance attributes
    that hide a tensor's attributes. ``(…)`` is a tuple, also a named one or one of ``torch.return_types``. ``[…]`` is a
    list, ``{key:…}`` a dict with string keys in insertion order, and ``?Type`` any other value.
    """
    leaves: list[Any] = []
    return _described(value, 0, leaves), leaves


def _described(node: Any, depth: int, leaves: list[Any]) -> str:
    # Not a nested function: a recursive closure is a reference cycle, and would keep the leaves alive until garbage
    # collection.
    kind = type(node)
    if (kind is torch.Tensor or kind is torch.nn.Parameter) and _is_plain(node):
        leaves.append(node)
        return "T"
    if depth < 8 and (issubclass(kind, tuple) or kind is list):
        left, right = "[]" if kind is list else "()"
        items = node if kind is list else tuple.__iter__(node)  # A subclass can define another iterator.
        return left + ",".join(_described(item, depth + 1, leaves) for item in items) + right
    if depth < 8 and kind is dict and all(type(key) is str for key in node):
        return "{" + ",".join(f"{key}:{_described(item, depth + 1, leaves)}" for key, item in node.items()) + "}"
    leaves.append(node)
    return f"?{kind.__name__}"


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not any(hasattr(torch.Tensor, name) for name in vars(tensor))


def widened(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that replaces a dtype in the float64 reference: float64, complex128, or the dtype itself."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype
