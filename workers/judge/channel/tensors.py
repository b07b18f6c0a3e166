"""The form and the location of a call's tensors in messages between the judge and a sealed process."""

from __future__ import annotations

import ast
import dataclasses
from dataclasses import dataclass
from enum import IntEnum
from operator import itemgetter
from typing import Any, Final, NamedTuple

import torch

#: Maximum number of tensors among the inputs of a call, and among its outputs.
MAX_TENSORS: Final = 128
#: Index of an output of a reference that shares memory with the model, and with the first output, the second, ...
LASTING: Final = 255
SHARED: Final = 256
#: Maximum number of dimensions of a tensor.
MAX_DIMS: Final = 8
#: Maximum length in bytes of the description of an output's structure (:func:`describe`).
MAX_STRUCTURE_BYTES: Final = 4096
#: Dtypes by their number in a message. The number 255 stands for any other dtype.
DTYPES: Final[tuple[torch.dtype, ...]] = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.uint16, torch.uint32, torch.uint64, torch.complex32),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2),
)
#: Formats for which torch has no arithmetic. Scales that are powers of two, and pairs of numbers in one byte.
PACKED: Final = frozenset({torch.float8_e8m0fnu, torch.float4_e2m1fn_x2})
#: Maximum depth of nested containers in an output.
_MOST_DEPTH: Final = 8
#: Text of a tensor in a structure.
_TENSOR: Final = "Tensor"


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
    """An input: the number of its root, its offset there in elements, its shape and strides, if it requires grad."""

    root: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool = False

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
        index: for ``INPUT``, the shared input's number. For other outputs of a reference, 1 plus the number of the
            input whose memory the output shares, :data:`LASTING` for memory of the model, :data:`SHARED` plus the
            number of an earlier output with the same memory, else 0.
        run: for ``EXPORTED``, the number of the run of allocations.
        offset: bytes from the beginning of the run, the input tensor or the arena. For ``OWN``, the address.
        stride: strides in elements.
    """

    where: Where = Where.NOWHERE
    index: int = 0
    run: int = 0
    offset: int = 0
    stride: tuple[int, ...] = ()


def describe(value: Any) -> tuple[str, list[torch.Tensor]]:
    """Return the structure of an output in Python's notation, and its tensors in order.

    ``Tensor`` is a dense tensor, exactly :class:`torch.Tensor` or :class:`torch.nn.Parameter`, without instance
    attributes that hide a tensor's attributes. Named tuples and ``torch.return_types`` are tuples. Subclasses of dict
    and dataclasses are dicts. The items of a dict are sorted by the text of their keys. Any other value than None has
    the name of its type in angle brackets.
    """
    leaves: list[torch.Tensor] = []
    return _described(value, 0, leaves), leaves


def _described(node: Any, depth: int, leaves: list[torch.Tensor]) -> str:
    # Not a nested function: a recursive closure is a reference cycle, and would keep the leaves alive until garbage
    # collection.
    kind = type(node)
    if node is None:
        return "None"
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        if reason := _unusual(node):
            return f"<{reason}>"
        leaves.append(node)
        return _TENSOR
    pairs: Any = None
    if issubclass(kind, dict):
        pairs = dict.items(node)  # A subclass can define other items.
    elif dataclasses.is_dataclass(kind):
        pairs = [(each.name, getattr(node, each.name)) for each in dataclasses.fields(kind)]
    elif not issubclass(kind, (tuple, list)):
        return f"<{kind.__name__}>"
    if depth >= _MOST_DEPTH:
        return f"<containers more than {_MOST_DEPTH} deep>"
    if pairs is not None:
        if others := {type(key) for key, _ in pairs} - {str, int, bool, type(None)}:
            return f"<dict with keys of the type {others.pop().__name__}>"
        items = sorted(((repr(key), item) for key, item in pairs), key=itemgetter(0))
        return "{" + ", ".join(f"{key}: {_described(item, depth + 1, leaves)}" for key, item in items) + "}"
    is_list = issubclass(kind, list)
    items = list.__iter__(node) if is_list else tuple.__iter__(node)
    texts = [_described(item, depth + 1, leaves) for item in items]
    return f"[{', '.join(texts)}]" if is_list else f"({', '.join(texts)}{',' * (len(texts) == 1)})"


def _unusual(tensor: torch.Tensor) -> str:
    """Return the property that distinguishes a tensor from a plain one, or an empty string."""
    if tensor.layout is not torch.strided:
        return f"{str(tensor.layout).removeprefix('torch.')} tensor"
    hides = any(hasattr(torch.Tensor, name) for name in vars(tensor))
    return "tensor whose attributes hide a tensor's" if hides else ""


def paths(structure: str) -> tuple[str, ...]:
    """Return the path of each tensor in an untrusted structure, such as ``[0]['a']``.

    Raise ValueError if the structure contains other values than tensors, None and their containers.
    """
    try:
        return tuple(_paths(ast.parse(structure, mode="eval").body, ""))
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(structure) from None


def _paths(node: ast.expr, path: str) -> list[str]:
    if isinstance(node, ast.Name) and node.id == _TENSOR:
        return [path]
    if isinstance(node, ast.Constant) and node.value is None:
        return []
    if isinstance(node, ast.Tuple | ast.List):
        items = [(str(number), item) for number, item in enumerate(node.elts)]
    elif isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant | ast.UnaryOp) for key in node.keys):
        items = [(ast.unparse(key), value) for key, value in zip(node.keys, node.values, strict=True) if key]
    else:
        raise ValueError(ast.unparse(node))
    return [found for key, item in items for found in _paths(item, f"{path}[{key}]")]


def output_name(number: int, every: tuple[str, ...]) -> str:
    """Return the words for an output, with its path unless that is only its number, or the name of a gradient."""
    path = every[number] if number < len(every) else ""
    if path and not path.startswith("["):
        return f"gradient of {path}"
    return f"output {number}" + (f" at {path}" if path not in ("", f"[{number}]") else "")


def widened(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that replaces a dtype in the float64 reference: float64, complex128, or the dtype itself."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point and dtype not in PACKED else dtype
