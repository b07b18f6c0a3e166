"""Replies and exports, the records that a sealed process sends to the judge.

The size of a reply depends on its number of tensors. An export announces memory of the process, with the descriptors
that open it. The judge checks every number and length against its bound before use. The location of an output is a
claim until the judge has opened that memory (:mod:`workers.judge.channel.buffers`).
"""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from workers.judge.channel.tensors import (
    DTYPES,
    MAX_DIMS,
    MAX_STRUCTURE_BYTES,
    MAX_TENSORS,
    Location,
    TensorSpec,
    Where,
)

_MAGIC: Final = 0x6B71_0001
_EXPORT_MAGIC: Final = 0x6B71_0002

#: Resource, amount required, amount available, the kernel's name, its constants and options.
_SHORTAGE = struct.Struct("=32sQQ64s256s")
_REPLY_HEAD = struct.Struct(f"=IIQqqQB{MAX_STRUCTURE_BYTES}s128s2048s{_SHORTAGE.size}sI")
_TENSOR = struct.Struct("=BBH8qBHQq8q")
#: Maximum size in bytes of a reply.
REPLY_BYTES: Final = _REPLY_HEAD.size + MAX_TENSORS * _TENSOR.size
#: Magic, the run's number, number of allocations in the run and in this record. The sizes follow.
_EXPORT_HEAD = struct.Struct("=IQII")
#: Maximum number of allocations in one record. A packet carries at most 253 descriptors.
MAX_EXPORTED: Final = 240
#: Maximum number of allocations in a run.
MAX_RUN: Final = 1 << 14

_OTHER: Final = 255


class ProtocolError(Exception):
    """Raised where the other side sent something that is not a valid message."""


class Answer(IntEnum):
    """The end of an order."""

    DONE = 1
    RAISED = 2
    """An exception ended the order (:class:`Tag`)."""
    MISMATCH = 3
    """The outputs differ from the reference's in structure, shapes, dtypes or devices. The reply describes them."""


class Tag(IntEnum):
    """The kind of exception that ended an order, from its type and CUDA's error code."""

    OTHER = 0
    ENTRY_POINT = 1
    COMPILE = 2
    HOST_MEMORY = 3
    GPU_MEMORY = 4
    RESOURCES = 5
    CUDA = 6
    EXIT = 7
    PROBLEM = 8
    """The problem does not have the required form."""
    FILES = 9
    """There was no disk space for a file."""
    NEEDS_GPU = 10
    """Triton's interpreter lacks what the kernel uses."""


_DEVICES: Final = ("cpu", "cuda", "meta")


@dataclass(frozen=True, slots=True)
class Shortage:
    """A launch that needs more of a resource than the GPU has.

    Attributes:
        resource: the resource, such as ``shared memory``. Empty for no shortage.
        required: the amount that the launch needs.
        limit: the amount that the GPU has.
        kernel: the kernel's name. Empty if unknown.
        settings: the kernel's constants and options, such as ``BLOCK=128, num_warps=8``.
    """

    resource: str = ""
    required: int = 0
    limit: int = 0
    kernel: str = ""
    settings: str = ""

    def pack(self) -> bytes:
        """Pack this record into the bytes that a reply contains."""
        texts = _fit(self.resource, 32), _fit(self.kernel, 64), _fit(self.settings, 256)
        return _SHORTAGE.pack(texts[0], self.required, self.limit, *texts[1:])

    @classmethod
    def unpack(cls, data: bytes) -> Shortage:
        """Parse the binary form. Any bytes of the right size are valid."""
        resource, required, limit, kernel, settings = _SHORTAGE.unpack(data)
        return cls(_text(resource), required, limit, _text(kernel), _text(settings))


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to an order. Only a reference sets ``drew``, ``differentiates`` and ``written_bytes``.

    Attributes:
        sequence: the order's number.
        tag: for ``RAISED``, the kind of exception.
        code: CUDA's error code, 0 for none.
        structure: the output's structure, such as ``(T,T)`` (see ``describe``).
        exception: qualified name of the exception's type.
        message: the exception's text. It is only shown, and no decision depends on it.
        tensors: the specs of the outputs, or of the inputs after ``DRAW``.
        locations: the tensors' locations, in the same order.
        drew: whether the call drew random numbers.
        differentiates: whether the model uses autograd in its forward.
        written_bytes: size in bytes of the outputs that are neither inputs nor weights.
        shortage: for the tag ``RESOURCES``, the missing resource, if known.
    """

    answer: Answer
    sequence: int
    tag: Tag = Tag.OTHER
    code: int = 0
    structure: str = ""
    exception: str = ""
    message: str = ""
    tensors: tuple[TensorSpec, ...] = field(default=())
    locations: tuple[Location, ...] = field(default=())
    drew: bool = False
    differentiates: bool = False
    written_bytes: int = 0
    shortage: Shortage = Shortage()

    def pack(self) -> bytes:
        """Return the binary form."""
        head = _REPLY_HEAD.pack(
            *(
                _MAGIC,
                self.answer,
                self.sequence,
                self.tag,
                self.code,
                self.written_bytes,
                self.drew | self.differentiates << 1,
            ),
            *(_fit(self.structure, MAX_STRUCTURE_BYTES), _fit(self.exception, 128), _fit(self.message, 2048)),
            *(self.shortage.pack(), len(self.tensors)),
        )
        locations = self.locations or (Location(),) * len(self.tensors)
        body = b"".join(_pack_tensor(spec, location) for spec, location in zip(self.tensors, locations, strict=True))
        return head + body

    @classmethod
    def unpack(cls, data: bytes) -> Reply:
        """Parse an untrusted record, or raise ProtocolError."""
        if len(data) < _REPLY_HEAD.size:
            raise ProtocolError(f"a reply of {len(data)} bytes")
        magic, answer, sequence, tag, code, written, traits, structure, exception, message, shortage, count = (
            _REPLY_HEAD.unpack_from(data)
        )
        if magic != _MAGIC or count > MAX_TENSORS or traits > 3:
            raise ProtocolError("a reply with a malformed header")
        if len(data) != _REPLY_HEAD.size + count * _TENSOR.size:
            raise ProtocolError(f"a reply of {len(data)} bytes with {count} tensors")
        try:
            tensors = [_unpack_tensor(data, _REPLY_HEAD.size + i * _TENSOR.size) for i in range(count)]
            return cls(
                *(Answer(answer), sequence, Tag(tag), code, _text(structure), _text(exception), _text(message)),
                *(tuple(spec for spec, _ in tensors), tuple(location for _, location in tensors)),
                *(bool(traits & 1), bool(traits & 2), written, Shortage.unpack(shortage)),
            )
        except ValueError as error:
            raise ProtocolError(f"a reply with an unknown number: {error}") from None


def _fit(text: str, size: int) -> bytes:
    return text.encode("utf-8", "replace")[:size]


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode("utf-8", "replace")


def _pack_tensor(spec: TensorSpec, location: Location) -> bytes:
    dtype = DTYPES.index(spec.dtype) if spec.dtype is not None else _OTHER
    device = _DEVICES.index(spec.device) if spec.device in _DEVICES else _OTHER
    # Of a tensor with too many dimensions only MAX_DIMS sizes are sent, with the true number of dimensions.
    shape, stride = (((*numbers[:MAX_DIMS],) + (0,) * MAX_DIMS)[:MAX_DIMS] for numbers in (spec.shape, location.stride))
    return _TENSOR.pack(
        dtype, device, len(spec.shape), *shape, location.where, location.index, location.run, location.offset, *stride
    )


def _unpack_tensor(data: bytes, offset: int) -> tuple[TensorSpec, Location]:
    dtype, device, ndim, *more = _TENSOR.unpack_from(data, offset)
    shape, (where, index, run, begin), stride = more[:8], more[8:12], more[12:]
    if dtype >= len(DTYPES) and dtype != _OTHER:
        raise ProtocolError("a reply with an unknown dtype")
    spec = TensorSpec(
        DTYPES[dtype] if dtype != _OTHER else None,
        tuple(shape[: min(ndim, MAX_DIMS)]) + (0,) * max(0, min(ndim, 64) - MAX_DIMS),
        _DEVICES[device] if device < len(_DEVICES) else "other",
    )
    return spec, Location(Where(where), index, run, begin, tuple(stride[: min(ndim, MAX_DIMS)]))


@dataclass(frozen=True, slots=True)
class Export:
    """Memory that the process announces: a run of GPU allocations at consecutive addresses, or part of one.

    On a CPU it is the process's whole memory, as one descriptor of size 0, announced once.

    Attributes:
        total: number of allocations in the whole run.
        sizes: sizes in bytes of the allocations in this record.
        descriptors: the allocations' descriptors, which the receiver closes.
    """

    run: int
    total: int
    sizes: tuple[int, ...]
    descriptors: tuple[int, ...]

    def pack(self) -> bytes:
        """Return the binary form. The descriptors are sent separately in the same packet."""
        head = _EXPORT_HEAD.pack(_EXPORT_MAGIC, self.run, self.total, len(self.sizes))
        return head + struct.pack(f"={len(self.sizes)}Q", *self.sizes)

    @staticmethod
    def is_announced(data: bytes) -> bool:
        """Return whether an untrusted record claims to be an export."""
        return len(data) >= _EXPORT_HEAD.size and int.from_bytes(data[:4], sys.byteorder) == _EXPORT_MAGIC

    @classmethod
    def unpack(cls, data: bytes, descriptors: list[int]) -> Export:
        """Parse an untrusted record, or raise ProtocolError."""
        if len(data) < _EXPORT_HEAD.size:
            raise ProtocolError("a truncated export")
        magic, run, total, count = _EXPORT_HEAD.unpack_from(data)
        if magic != _EXPORT_MAGIC or not 0 < count <= min(total, MAX_EXPORTED) or total > MAX_RUN:
            raise ProtocolError("an export with a malformed header")
        if len(data) != _EXPORT_HEAD.size + 8 * count or len(descriptors) != count:
            raise ProtocolError("an export whose number of allocations does not match its header")
        return cls(run, total, struct.unpack_from(f"={count}Q", data, _EXPORT_HEAD.size), tuple(descriptors))
