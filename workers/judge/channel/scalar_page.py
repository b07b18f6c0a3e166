"""The sheet: a page of shared memory on which a reference tells values that are no tensors of a call.

A problem's ``get_init_inputs()`` and the arrangement of its ``get_inputs()`` are Python values. The reference writes
them in a small JSON form, the judge copies the page and decodes it. Whatever stands there, the decoder makes plain
values of it or raises one error; it never calls anything that the writer names.
"""

from __future__ import annotations

import io
import json
import struct
from mmap import mmap
from typing import Any, Final, cast

import torch

from workers.judge.channel.arguments import LEAF
from workers.judge.channel.protocol import DTYPES

#: Bytes of a sheet. Only what is written takes memory.
SIZE: Final = 64 << 20
#: The text, in bytes; tensors come behind it.
_MOST_TEXT: Final = 1 << 20
_HEAD: Final = struct.Struct("=IQQ")  # magic, bytes of text, bytes of tensors
_MAGIC: Final = 0x6B71_5348
_DTYPES: Final = {str(dtype): dtype for dtype in DTYPES}
_MOST_DEPTH: Final = 32
#: Items of one set or dict: a writer can choose items that all collide, which takes time by the square of their number.
_MOST_HASHED: Final = 1024


class ScalarPageError(ValueError):
    """The values cannot be told or read; the message says why."""


def encode(value: Any) -> bytes:
    """Return a sheet's content.

    Args:
        value: None, bool, int, float, complex, str, bytes, :class:`torch.dtype`, :class:`torch.device`,
            :class:`torch.Size`, slice, range, :data:`LEAF` and dense tensors, in lists, tuples, sets and dicts.

    Raises:
        ScalarPageError: it holds something else, or too much.
    """
    tensors = io.BytesIO()
    text = json.dumps(_encode(value, tensors, 0)).encode()
    if len(text) > _MOST_TEXT or len(text) + tensors.tell() > SIZE - _HEAD.size:
        raise ScalarPageError(f"values of more than {_MOST_TEXT} bytes, or tensors of more than {SIZE} bytes")
    return _HEAD.pack(_MAGIC, len(text), tensors.tell()) + text + tensors.getvalue()


def decode(page: bytes | mmap) -> Any:
    """Return the values of a sheet that may hold anything. It is copied first, as its writer may still change it.

    Raises:
        ScalarPageError: it cannot be read.
    """
    head = bytes(page[: _HEAD.size])
    if len(head) < _HEAD.size:
        raise ScalarPageError("the sheet is too short")
    magic, text_bytes, tensor_bytes = _HEAD.unpack(head)
    if magic != _MAGIC or text_bytes > _MOST_TEXT or text_bytes + tensor_bytes > SIZE - _HEAD.size:
        raise ScalarPageError("nothing that can be read stands on the sheet")
    content = bytes(page[_HEAD.size : _HEAD.size + text_bytes + tensor_bytes])
    try:
        return _Decoder(content[text_bytes:]).decode(json.loads(content[:text_bytes]), 0)
    except ScalarPageError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, RuntimeError, OverflowError) as error:
        raise ScalarPageError(f"what stands on the sheet cannot be read: {type(error).__name__}") from None


def _encode(value: Any, tensors: io.BytesIO, depth: int) -> Any:
    kind = type(value)
    if depth > _MOST_DEPTH:
        raise ScalarPageError("values that are nested too deeply")
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_encode(item, tensors, depth + 1) for item in value]
    if kind in (dict, set, frozenset):
        _few(value)
    if kind in (tuple, set, frozenset, torch.Size):
        return {"is": kind.__name__.lower(), "of": [_encode(item, tensors, depth + 1) for item in value]}
    if kind is dict:
        pairs = [[_encode(key, tensors, depth + 1), _encode(item, tensors, depth + 1)] for key, item in value.items()]
        return {"is": "dict", "of": pairs}
    if kind in (slice, range):
        return {"is": kind.__name__, "of": [value.start, value.stop, value.step]}
    if kind is complex:
        return {"is": "complex", "of": [value.real, value.imag]}
    if kind is bytes:
        return {"is": "bytes", "of": list(value)}
    if kind in (torch.dtype, torch.device):
        return {"is": kind.__name__, "of": str(value)}
    if value is LEAF:
        return {"is": "leaf"}
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return _encode_tensor(value, tensors)
    raise ScalarPageError(f"a value of the type {kind.__module__}.{kind.__qualname__}")


def _encode_tensor(tensor: torch.Tensor, tensors: io.BytesIO) -> Any:
    if tensor.layout is not torch.strided or tensor.dtype not in DTYPES:
        raise ScalarPageError(f"a tensor of the layout {tensor.layout} and the dtype {tensor.dtype}")
    dense = tensor.detach().cpu().contiguous()
    if tensors.tell() + dense.nbytes > SIZE:
        raise ScalarPageError(f"tensors of more than {SIZE} bytes")
    told = {"is": "tensor", "dtype": str(tensor.dtype), "shape": list(tensor.shape), "at": tensors.tell()}
    if dense.numel():
        tensors.write(dense.reshape(-1).view(torch.uint8).numpy().tobytes())
    return told


class _Decoder:
    """Makes values of a sheet's text, and of the bytes of its tensors: each byte belongs to one tensor."""

    def __init__(self, tensors: bytes) -> None:
        self._tensors = tensors
        self._read = 0

    def decode(self, told: Any, depth: int) -> Any:
        """Return the value that a part of the text tells; raises :class:`ScalarPageError` or what nonsense raises."""
        if depth > _MOST_DEPTH:
            raise ScalarPageError("values that are nested too deeply")
        if told is None or isinstance(told, (bool, int, float, str)):
            return told
        if isinstance(told, list):
            return self._items(told, depth)
        kind, of = told["is"], told.get("of")
        if kind in ("tuple", "size"):
            return (tuple if kind == "tuple" else torch.Size)(self._items(of, depth))
        if kind in ("set", "frozenset"):
            return (set if kind == "set" else frozenset)(self._items(_few(of), depth))
        if kind == "dict":
            return {self.decode(key, depth + 1): self.decode(item, depth + 1) for key, item in _few(of)}
        if kind == "slice":
            return slice(*(None if n is None else int(n) for n in of))
        if kind == "range":
            return range(*(int(n) for n in of))
        if kind == "complex":
            return complex(float(of[0]), float(of[1]))
        if kind == "bytes":
            return bytes(list(of))
        if kind == "dtype":
            return _DTYPES[of]
        if kind == "device":
            return torch.device(str(of)[:16])
        if kind in ("leaf", "tensor"):
            return LEAF if kind == "leaf" else self._tensor(told)
        raise ScalarPageError("a value of an unknown kind")

    def _items(self, told: Any, depth: int) -> list[Any]:
        return [self.decode(item, depth + 1) for item in cast("list[Any]", told)]

    def _tensor(self, told: Any) -> torch.Tensor:
        """Read the next tensor. None may lie over another, so that a few bytes cannot become many gigabytes."""
        dtype, shape, at = _DTYPES[told["dtype"]], [int(size) for size in told["shape"]], int(told["at"])
        if len(shape) > 64 or min(shape, default=0) < 0:
            raise ScalarPageError("a tensor of an impossible shape")
        if at != self._read:
            raise ScalarPageError("a tensor that does not lie behind the one before")
        count = 1
        for size in shape:
            count *= size
        end = at + count * dtype.itemsize
        if end > len(self._tensors):
            raise ScalarPageError("a tensor beyond what was written")
        self._read = end
        if not count:
            return torch.empty(shape, dtype=dtype)
        data = bytearray(self._tensors[at:end])
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)


def _few(items: Any) -> Any:
    if len(items) > _MOST_HASHED:
        raise ScalarPageError(f"a set or dict of more than {_MOST_HASHED} items")
    return items
