"""Messages between judge and candidate over a ``SOCK_SEQPACKET`` socket.

Commands go to the candidate: a fixed header, and file descriptors beside it. Where a command needs more
(the job, the buffers) it travels as a pickle in a memfd; only the candidate ever opens one, and only the
judge writes one.

Replies come from the candidate: one fixed-size record, in which every length is checked against its bound
here, on the judge's side, before it is used. Where an output lies is only a claim until the judge has opened
that memory itself (:mod:`workers.judge.channel.buffers`).
"""

from __future__ import annotations

import array
import os
import pickle
import socket
import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

import torch

#: The most tensors that an output may hold.
MAX_TENSORS: Final = 32
#: The most dimensions that a tensor may have.
MAX_DIMS: Final = 8

#: The longest description of an output's arrangement (:func:`describe`), in bytes.
MAX_STRUCTURE_BYTES: Final = 1024

_MAGIC: Final = 0x6B71_0001
_COMMAND = struct.Struct("=IIQq")
_REPLY_HEAD = struct.Struct(f"=IIQqq{MAX_STRUCTURE_BYTES}s128s2048sI")
_TENSOR = struct.Struct("=BBH8qBB64sQq8q")
_REPLY_BYTES: Final = _REPLY_HEAD.size + MAX_TENSORS * _TENSOR.size

#: Dtypes by their number in a message; 255 is any other.
DTYPES: Final[tuple[torch.dtype, ...]] = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
_OTHER: Final = 255


class ProtocolError(Exception):
    """The other side sent something that is not a message."""


class Order(IntEnum):
    """What the judge can ask of a candidate."""

    OPEN = 9
    """Get ready: the device, and the source in a file. Carries the job (:class:`Job`); none of it runs yet."""
    LOAD = 1
    """Import the source."""
    CONSTRUCT = 2
    """Construct the model and move it to the device."""
    BIND_INPUTS = 3
    """Open the shared inputs."""
    REHEARSE = 4
    """Compile what the first call would compile, launching nothing."""
    BIND_OUTPUTS = 5
    """Know the outputs' form. On a CPU, open the shared outputs."""
    RUN = 6
    """One call: forward on the shared inputs. On a CPU outputs are copied to the shared ones; on a GPU the reply
    says where they lie."""
    TIME = 7
    """One timed call: get ready, wait for the go-ahead in the shared flags, then as RUN; on a GPU with an empty kernel
    before the forward."""
    TIME_NULL = 8
    """As TIME without a forward: delivers the last outputs again."""
    AHEAD = 10
    """One timed call on a GPU, enqueued ahead: its stream waits for the go-ahead and then says that it is done;
    the reply comes as soon as all is enqueued."""
    AHEAD_NULL = 11
    """As AHEAD with an empty kernel instead of a forward."""
    AHEAD_IN_TURN = 14
    """As AHEAD with an empty kernel before the forward."""
    PROFILE = 12
    """One call, profiled: the names of what ran on the GPU go to the memory beside the order."""
    BUILD = 13
    """In a builder: import the source, and keep the libraries that it has compiled. Carries the architectures of
    GPUs to compile for; empty where there is none."""


class Answer(IntEnum):
    """How an order ended."""

    DONE = 1
    RAISED = 2
    """An exception ended it; see :class:`Tag`."""
    MISMATCH = 3
    """The outputs do not have the reference's structure, shapes, dtypes or devices; they are described."""


class Tag(IntEnum):
    """What kind of exception ended an order, by its type and by CUDA's error code."""

    OTHER = 0
    ENTRY_POINT = 1
    COMPILE = 2
    HOST_MEMORY = 3
    GPU_MEMORY = 4
    RESOURCES = 5
    CUDA = 6
    EXIT = 7


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's outside: dtype (None: one that the protocol does not know), shape and device type."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    device: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The spec of ``tensor``."""
        return cls(tensor.dtype if tensor.dtype in DTYPES else None, tuple(tensor.shape), tensor.device.type)


_DEVICES: Final = ("cpu", "cuda", "meta")


class Where(IntEnum):
    """In whose memory an output lies."""

    NOWHERE = 0
    """It could not be delivered, or it is empty."""
    SHARED = 1
    """It was copied to the shared output of the same number."""
    INPUT = 2
    """It is a view of a shared input."""
    EXPORTED = 3
    """It lies in an allocation of the candidate's, which a CUDA IPC handle opens."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an output lies, as the candidate says.

    Attributes:
        where: in whose memory.
        index: the shared input's number, for ``INPUT``.
        handle: CUDA IPC handle of the allocation, for ``EXPORTED``.
        serial: tells allocations of one process apart that have had the same address.
        offset: bytes from the allocation's (or the input tensor's) beginning.
        stride: in elements.
    """

    where: Where = Where.NOWHERE
    index: int = 0
    handle: bytes = b""
    serial: int = 0
    offset: int = 0
    stride: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """What a candidate answered.

    Attributes:
        answer: how the order ended.
        sequence: the order's number.
        tag: the kind of exception, for ``RAISED``.
        code: CUDA's error code, 0 for none.
        structure: the output's arrangement, such as ``(T,T)``; see :func:`describe`.
        exception: qualified name of the exception's type.
        message: its text. For people only: nothing is decided by it.
        tensors: the outputs' specs.
        places: where they lie, in the same order.
    """

    answer: Answer
    sequence: int
    tag: Tag = Tag.OTHER
    code: int = 0
    structure: str = ""
    exception: str = ""
    message: str = ""
    tensors: tuple[TensorSpec, ...] = field(default=())
    places: tuple[Place, ...] = field(default=())

    def pack(self) -> bytes:
        """The record as it travels."""
        head = _REPLY_HEAD.pack(
            _MAGIC,
            self.answer,
            self.sequence,
            self.tag,
            self.code,
            _fit(self.structure, MAX_STRUCTURE_BYTES),
            _fit(self.exception, 128),
            _fit(self.message, 2048),
            len(self.tensors),
        )
        places = self.places or (Place(),) * len(self.tensors)
        body = b"".join(_pack_tensor(spec, place) for spec, place in zip(self.tensors, places, strict=True))
        return (head + body).ljust(_REPLY_BYTES, b"\0")

    @classmethod
    def unpack(cls, data: bytes) -> Reply:
        """Read a record that cannot be trusted.

        Raises:
            ProtocolError: it is not one.
        """
        if len(data) != _REPLY_BYTES:
            raise ProtocolError(f"a reply of {len(data)} bytes instead of {_REPLY_BYTES}")
        magic, answer, sequence, tag, code, structure, exception, message, count = _REPLY_HEAD.unpack_from(data)
        if magic != _MAGIC or count > MAX_TENSORS:
            raise ProtocolError("a reply with a wrong head")
        try:
            tensors = [_unpack_tensor(data, _REPLY_HEAD.size + i * _TENSOR.size) for i in range(count)]
            return cls(
                Answer(answer),
                sequence,
                Tag(tag),
                code,
                _text(structure),
                _text(exception),
                _text(message),
                tuple(spec for spec, _ in tensors),
                tuple(place for _, place in tensors),
            )
        except ValueError as error:
            raise ProtocolError(f"a reply with an unknown number: {error}") from None


def _fit(text: str, size: int) -> bytes:
    return text.encode("utf-8", "replace")[:size]


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode("utf-8", "replace")


def _pack_tensor(spec: TensorSpec, place: Place) -> bytes:
    dtype = DTYPES.index(spec.dtype) if spec.dtype is not None else _OTHER
    device = _DEVICES.index(spec.device) if spec.device in _DEVICES else _OTHER
    # A tensor of more dimensions than travel is told by its true count, beyond MAX_DIMS.
    shape, stride = (((*numbers[:MAX_DIMS],) + (0,) * MAX_DIMS)[:MAX_DIMS] for numbers in (spec.shape, place.stride))
    return _TENSOR.pack(
        dtype,
        device,
        len(spec.shape),
        *shape,
        place.where,
        place.index,
        place.handle,
        place.serial,
        place.offset,
        *stride,
    )


def _unpack_tensor(data: bytes, offset: int) -> tuple[TensorSpec, Place]:
    dtype, device, ndim, *more = _TENSOR.unpack_from(data, offset)
    shape, (where, index, handle, serial, begin), stride = more[:8], more[8:13], more[13:]
    if dtype >= len(DTYPES) and dtype != _OTHER:
        raise ProtocolError("a reply with an unknown dtype")
    spec = TensorSpec(
        DTYPES[dtype] if dtype != _OTHER else None,
        tuple(shape[: min(ndim, MAX_DIMS)]) + (0,) * max(0, min(ndim, 64) - MAX_DIMS),
        _DEVICES[device] if device < len(_DEVICES) else "other",
    )
    return spec, Place(Where(where), index, handle, serial, begin, tuple(stride[: min(ndim, MAX_DIMS)]))


def describe(value: Any) -> tuple[str, list[Any]]:
    """The arrangement of an output and its leaves in order.

    ``T`` is a dense tensor (exactly :class:`torch.Tensor` or :class:`torch.nn.Parameter`, without attributes of
    its own that stand for a tensor's), ``(…)`` a tuple,
    ``[…]`` a list, ``{key:…}`` a dict with string keys in its own order, ``?Type`` anything else.
    """
    leaves: list[Any] = []

    def walk(node: Any, depth: int) -> str:
        kind = type(node)
        if (kind is torch.Tensor or kind is torch.nn.Parameter) and _is_plain(node):
            leaves.append(node)
            return "T"
        if depth < 8 and kind in (tuple, list):
            left, right = "()" if kind is tuple else "[]"
            return left + ",".join(walk(item, depth + 1) for item in node) + right
        if depth < 8 and kind is dict and all(type(key) is str for key in node):
            return "{" + ",".join(f"{key}:{walk(item, depth + 1)}" for key, item in node.items()) + "}"
        leaves.append(node)
        return f"?{kind.__name__}"

    return walk(value, 0), leaves


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not any(hasattr(torch.Tensor, name) for name in vars(tensor))


@dataclass(frozen=True, slots=True)
class Job:
    """What a candidate must know to load and construct a model.

    Attributes:
        source: the module's source.
        entry: the class to construct: ``ModelNew``, or ``Model`` where the reference itself is timed.
        device: ``cpu`` or ``cuda``.
        dtype: the floating dtype of weights and inputs.
        seed: set before construction.
        init_inputs: the constructor's arguments.
        memory_fraction: the share of the GPU's memory that torch may take.
        compiled: run the model under ``torch.compile``.
        built: where libraries lie that were compiled before; empty where none were.
    """

    source: str
    entry: str
    device: str
    dtype: torch.dtype
    seed: int
    init_inputs: list[Any]
    memory_fraction: float
    compiled: bool = False
    built: str = ""


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """A shared buffer and the tensor that lives in it.

    Attributes:
        nbytes: size of the allocation.
        dtype, shape, stride: of the tensor.
        handle: CUDA IPC handle (64 bytes) on a GPU; None on a CPU, where the memory is a descriptor that
            travels beside the message, and for outputs on a GPU, which are not shared: only their form counts.
    """

    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    handle: bytes | None


@dataclass(frozen=True, slots=True)
class Binding:
    """The shared buffers of the inputs or outputs, in order.

    Attributes:
        buffers: one for each tensor.
        arguments: for inputs: ``forward``'s arguments, with ``None`` in a tensor's place.
        tensors: for inputs: the places of the tensors in ``arguments``.
        structure: for outputs: the arrangement that the reference returns.
    """

    buffers: tuple[BufferSpec, ...]
    arguments: tuple[Any, ...] = ()
    tensors: tuple[int, ...] = ()
    structure: str = ""


@dataclass(frozen=True, slots=True)
class Command:
    """An order as the candidate receives it."""

    order: Order
    sequence: int
    seed: int
    payload: Any
    descriptors: tuple[int, ...]


def send_command(
    channel: socket.socket,
    order: Order,
    sequence: int,
    *,
    seed: int = 0,
    payload: Any = None,
    fds: tuple[int, ...] = (),
) -> None:
    """Send an order, ``payload`` as a pickle in a memfd of its own, ``fds`` beside it.

    Raises:
        OSError: the candidate is gone.
    """
    attached = list(fds)
    memory = -1
    if payload is not None:
        memory = os.memfd_create("kqueue-payload", os.MFD_CLOEXEC)
        with os.fdopen(os.dup(memory), "wb") as stream:
            pickle.dump(payload, stream, protocol=pickle.HIGHEST_PROTOCOL)
        attached.insert(0, memory)
    try:
        head = _COMMAND.pack(_MAGIC, order, sequence, seed if seed < 2**63 else seed - 2**64)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", attached))] if attached else []
        channel.sendmsg([head + bytes([payload is not None])], ancillary)
    finally:
        if memory >= 0:
            os.close(memory)


def receive_command(channel: socket.socket) -> Command | None:
    """Wait for an order; None when the judge has gone. Runs in the candidate."""
    data, fds = receive_with_fds(channel, _COMMAND.size + 1)
    if not data:
        return None
    _, order, sequence, seed = _COMMAND.unpack_from(data)
    payload = None
    if data[-1]:
        memory = fds.pop(0)
        os.lseek(memory, 0, os.SEEK_SET)
        with os.fdopen(memory, "rb") as stream:
            payload = pickle.load(stream)  # noqa: S301 -- written by the judge, for the candidate alone
    return Command(Order(order), sequence, seed, payload, tuple(fds))


def receive_with_fds(channel: socket.socket, size: int) -> tuple[bytes, list[int]]:
    """Receive one packet of at most ``size`` bytes and the descriptors beside it."""
    fds = array.array("i")
    data, ancillary, _, _ = channel.recvmsg(size, socket.CMSG_SPACE(253 * fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds)


def receive_reply(channel: socket.socket) -> Reply | None:
    """Wait for a reply; None when the candidate has gone.

    Raises:
        ProtocolError: the candidate sent something else.
    """
    # One byte more than a reply, so that a longer packet is seen as such instead of being cut to fit.
    try:
        data, _, _, _ = channel.recvmsg(_REPLY_BYTES + 1)
    except ConnectionResetError:
        return None
    return Reply.unpack(data) if data else None
