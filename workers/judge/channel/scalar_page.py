"""The scalar page: shared memory in which a reference reports Python values.

These are the values of ``get_init_inputs()`` and the arrangement of ``get_inputs()``. The reference writes them as
JSON, and the judge copies the page and decodes it. For any content, the decoder returns plain values or raises one
error. It never calls a function that the writer names.
"""

from __future__ import annotations

import io
import json
import math
import struct
from mmap import mmap
from typing import Any, Final, cast

import torch

from workers.judge.channel.arguments import LEAF
from workers.judge.channel.objects import Built, Named, as_data
from workers.judge.channel.tensors import DTYPES

#: Size of a scalar page in bytes. Only written pages of the host take memory.
SIZE: Final = 64 << 20
#: Maximum length of the text in bytes. The tensors' bytes follow the text.
_MOST_TEXT: Final = 1 << 20
_HEAD: Final = struct.Struct("=IQQ")  # magic, bytes of text, bytes of tensors
_MAGIC: Final = 0x6B71_5348
_DTYPES: Final = {str(dtype): dtype for dtype in DTYPES}
_MOST_DEPTH: Final = 32
#: Maximum number of items of one set or dict. The writer can choose items whose hashes collide, and then building the
#: set takes quadratic time.
_MOST_HASHED: Final = 1024


class ScalarPageError(ValueError):
    """Raised where values cannot be encoded or decoded. The message gives the reason."""


def encode(value: Any) -> bytes:
    """Return the content of a scalar page, or raise ScalarPageError if the value is unsupported or too large.

    Supported are None, bool, int, float, complex, str, bytes, :class:`torch.dtype`, :class:`torch.device`,
    :class:`torch.Size`, slice, range, :data:`LEAF`, dense tensors and the objects of
    :mod:`~workers.judge.channel.objects`, in lists, tuples, sets and dicts.
    """
    tensors = io.BytesIO()
    text = json.dumps(_encode(value, tensors, 0)).encode()
    if len(text) > _MOST_TEXT or len(text) + tensors.tell() > SIZE - _HEAD.size:
        raise ScalarPageError(f"values of more than {_MOST_TEXT} bytes, or tensors of more than {SIZE} bytes")
    return _HEAD.pack(_MAGIC, len(text), tensors.tell()) + text + tensors.getvalue()


def decode(page: bytes | mmap) -> Any:
    """Decode an untrusted scalar page, or raise ScalarPageError. Copy it first: its writer can still change it."""
    head = bytes(page[: _HEAD.size])
    if len(head) < _HEAD.size:
        raise ScalarPageError("the scalar page is too short")
    magic, text_bytes, tensor_bytes = _HEAD.unpack(head)
    if magic != _MAGIC or text_bytes > _MOST_TEXT or text_bytes + tensor_bytes > SIZE - _HEAD.size:
        raise ScalarPageError("the header of the scalar page is malformed")
    content = bytes(page[_HEAD.size : _HEAD.size + text_bytes + tensor_bytes])
    try:
        return _Decoder(content[text_bytes:]).decode(json.loads(content[:text_bytes]), 0)
    except ScalarPageError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, RuntimeError, OverflowError) as error:
        raise ScalarPageError(f"the content of the scalar page is malformed: {type(error).__name__}") from None


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
    try:
        data = as_data(value)
    except ValueError as error:
        raise ScalarPageError(str(error)) from None
    of = _encode(data.attributes, tensors, depth + 1) if isinstance(data, Built) else None
    return {"is": "object", "name": data.name, "of": of}


def _encode_tensor(tensor: torch.Tensor, tensors: io.BytesIO) -> Any:
    if tensor.layout is not torch.strided or tensor.dtype not in DTYPES:
        raise ScalarPageError(f"a tensor of the layout {tensor.layout} and the dtype {tensor.dtype}")
    dense = tensor.detach().cpu().contiguous()
    if tensors.tell() + dense.nbytes > SIZE:
        raise ScalarPageError(f"tensors of more than {SIZE} bytes")
    encoded = {"is": "tensor", "dtype": str(tensor.dtype), "shape": list(tensor.shape), "at": tensors.tell()}
    if dense.numel():
        tensors.write(dense.reshape(-1).view(torch.uint8).numpy().tobytes())
    return encoded


class _Decoder:
    """Decodes the values of a scalar page from its parsed text and its tensors' bytes."""

    def __init__(self, tensors: bytes) -> None:
        self._tensors = tensors
        self._read = 0

    def decode(self, encoded: Any, depth: int) -> Any:
        """Decode one value. Malformed input can raise other exceptions than :class:`ScalarPageError`."""
        if depth > _MOST_DEPTH:
            raise ScalarPageError("values that are nested too deeply")
        if encoded is None or isinstance(encoded, (bool, int, float, str)):
            return encoded
        if isinstance(encoded, list):
            return self._items(encoded, depth)
        kind, of = encoded["is"], encoded.get("of")
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
        if kind in ("dtype", "device"):
            return _DTYPES[of] if kind == "dtype" else torch.device(str(of)[:16])
        if kind == "object":
            name = str(encoded["name"])
            return Named(name) if of is None else Built(name, self.decode(of, depth + 1))
        if kind in ("leaf", "tensor"):
            return LEAF if kind == "leaf" else self._tensor(encoded)
        raise ScalarPageError("a value of an unknown kind")

    def _items(self, encoded: Any, depth: int) -> list[Any]:
        return [self.decode(item, depth + 1) for item in cast("list[Any]", encoded)]

    def _tensor(self, encoded: Any) -> torch.Tensor:
        """Read the next tensor. Tensors must not overlap, so that a few bytes cannot become many gigabytes."""
        dtype, shape, at = _DTYPES[encoded["dtype"]], [int(size) for size in encoded["shape"]], int(encoded["at"])
        if len(shape) > 64 or min(shape, default=0) < 0:
            raise ScalarPageError("a tensor of an impossible shape")
        if at != self._read:
            raise ScalarPageError("a tensor that does not begin where the previous one ends")
        count = math.prod(shape)
        end = at + count * dtype.itemsize
        if end > len(self._tensors):
            raise ScalarPageError("a tensor beyond the end of the written bytes")
        self._read = end
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(self._tensors[at:end]), dtype=torch.uint8).view(dtype).reshape(shape)


def _few(items: Any) -> Any:
    if len(items) > _MOST_HASHED:
        raise ScalarPageError(f"a set or dict of more than {_MOST_HASHED} items")
    return items
