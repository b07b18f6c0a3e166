"""Messages between the judge and a sealed process, over a ``SOCK_SEQPACKET`` socket.

The judge sends commands: a fixed header, and file descriptors beside it. A larger payload (the job, the buffers)
travels as a pickle in a memfd; only the judge writes one, and only the sealed process opens one.

The sealed process, a candidate or a reference, sends two kinds of records. A reply has a fixed size. An export
announces memory of the process, with the descriptors that open it. The judge checks every number and length against
its bound before it uses it; where an output lies is a claim until the judge has opened that memory itself
(:mod:`workers.judge.channel.buffers`).
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import sys
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

import torch

from workers.judge.channel.packets import receive_with_fds, send_with_fds

#: The most tensors that an output may hold.
MAX_TENSORS: Final = 32
#: The most dimensions that a tensor may have.
MAX_DIMS: Final = 8

#: The longest description of an output's arrangement (:func:`describe`), in bytes.
MAX_STRUCTURE_BYTES: Final = 1024

_MAGIC: Final = 0x6B71_0001
_EXPORT_MAGIC: Final = 0x6B71_0002
_COMMAND = struct.Struct("=IIQq?")
#: What is short, how much of it was asked for and there is, the kernel's name, its constants and options.
_SHORTAGE = struct.Struct("=32sQQ64s256s")
_REPLY_HEAD = struct.Struct(f"=IIQqqQBB{MAX_STRUCTURE_BYTES}s128s2048s{_SHORTAGE.size}sI")
_TENSOR = struct.Struct("=BBH8qBBQq8q")
_REPLY_BYTES: Final = _REPLY_HEAD.size + MAX_TENSORS * _TENSOR.size
#: Magic, the run's number, its allocations in all and in this record; their sizes follow.
_EXPORT_HEAD = struct.Struct("=IQII")
#: The most allocations that one record announces (a packet carries at most 253 descriptors), and that a run has.
MAX_EXPORTED: Final = 240
MAX_RUN: Final = 1 << 14

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
    """The orders of the judge."""

    OPEN = 9
    """Open the device. Carries an :class:`Opening`. On a CPU the process announces its memory, before the reply."""
    LOAD = 1
    """Take the job (:class:`Job`) and import its source."""
    CONSTRUCT = 2
    """Construct the model and move it to the device."""
    BIND_INPUTS = 3
    """Open the shared inputs."""
    WARM_UP = 4
    """Compile what the first call would compile, launching nothing. In a reference: load what variants of large inputs
    need."""
    BIND_OUTPUTS = 5
    """Know the outputs' form."""
    RUN = 6
    """Call forward on the shared inputs. The reply says where the outputs lie."""
    TIME = 7
    """Make one timed call: get ready, wait for GO in the shared flags, then do as RUN; on a GPU with an empty kernel
    before the forward."""
    TIME_OVERHEAD = 8
    """As TIME without a forward: deliver the last outputs again."""
    ENQUEUE = 10
    """Enqueue one timed call on a GPU: the stream waits for GO, runs the forward and writes DONE. The reply comes as
    soon as all is enqueued."""
    ENQUEUE_OVERHEAD = 11
    """As AHEAD with an empty kernel instead of a forward."""
    ENQUEUE_IN_TURN = 14
    """As AHEAD with an empty kernel before the forward."""
    PROFILE = 12
    """Make one call under a profiler; the names of the kernels that ran go to the memory beside the order."""
    BUILD = 13
    """In a builder: take the job, import its source, and keep the libraries that it has compiled."""
    INITIAL = 15
    """In a reference: call ``get_init_inputs()`` and write what it returns to the sheet."""
    TAKEN = 17
    """In a reference: tell on the sheet the bytes of the weights, and the most that the process has taken of the GPU's
    memory."""
    ALLOW = 18
    """Take so many bytes of the GPU's memory at most from now on."""
    DRAW = 16
    """In a reference: call ``get_inputs()`` for each input set of the payload (:class:`Draw`), and hold what it
    returns. The reply says where the tensors lie, one set behind the other; their arrangement stands on the sheet. A
    variant that cannot be made is a mismatch."""
    RELEASE = 21
    """In a reference: let go of input sets and of the answers to them (:class:`Release`)."""
    WIDEN = 19
    """In a reference: make a copy of the model in float64, of which questions may be asked then."""
    ANSWER = 27
    """In a reference: answer the questions of the payload (a tuple of :class:`Ask`), each with a reply that says where
    the outputs lie."""
    EXAMINE = 22
    """Start a program for the kernel and its problem, under a tool (:class:`Examine`). It waits before it opens the
    device."""
    FINISH = 23
    """Let that program go on, and wait for its end."""
    REPORT = 25
    """Write what the tool has said to the memory beside the order."""
    TEST = 26
    """Become a program that runs tests of a repository (:class:`Testing`) and says on the socket beside the order what
    happens. No order is obeyed any more."""
    ARENA = 24
    """In a reference: keep what it holds in this memory of the judge's, where there is room."""
    REST = 20
    """In a reference: give memory back that is not in use; it may serve another evaluation later."""


class Answer(IntEnum):
    """How an order ended."""

    DONE = 1
    RAISED = 2
    """An exception ended it; see :class:`Tag`."""
    MISMATCH = 3
    """The outputs do not have the reference's structure, shapes, dtypes or devices; they are described."""


class Tag(IntEnum):
    """The kind of exception that ended an order, by its type and by CUDA's error code."""

    OTHER = 0
    ENTRY_POINT = 1
    COMPILE = 2
    HOST_MEMORY = 3
    GPU_MEMORY = 4
    RESOURCES = 5
    CUDA = 6
    EXIT = 7
    PROBLEM = 8
    """The problem does not have the form that a problem must have."""
    FILES = 9
    """There was no room for a file."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The form of a tensor: dtype (None for one that the protocol does not know), shape and device type."""

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
    OWN = 1
    """It lies densely at an address of the process's own memory: on a CPU."""
    INPUT = 2
    """It is a view of a shared input."""
    EXPORTED = 3
    """It lies in a run of allocations that the process has announced (:class:`Export`): on a GPU."""
    ARENA = 4
    """It lies in the arena that the judge shares with a reference."""


@dataclass(frozen=True, slots=True)
class Location:
    """Where an output lies, as the candidate says.

    Attributes:
        where: in whose memory.
        index: the shared input's number, for ``INPUT``; of a reference's other outputs 1 plus the number of the input
            whose memory it is, else 0.
        run: the number of the run of allocations, for ``EXPORTED``.
        offset: bytes from the run's (or the input tensor's, or the arena's) beginning; the address, for ``OWN``.
        stride: in elements.
    """

    where: Where = Where.NOWHERE
    index: int = 0
    run: int = 0
    offset: int = 0
    stride: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Shortage:
    """A launch that asked a GPU for more than it has.

    Attributes:
        resource: what is short, such as ``shared memory``; empty for no shortage.
        required: how much the launch asks for.
        limit: how much there is.
        kernel: the kernel's name; empty if unknown.
        settings: its constants and options, such as ``BLOCK=128, num_warps=8``.
    """

    resource: str = ""
    required: int = 0
    limit: int = 0
    kernel: str = ""
    settings: str = ""

    def pack(self) -> bytes:
        """The part of a record."""
        words = _fit(self.resource, 32), _fit(self.kernel, 64), _fit(self.settings, 256)
        return _SHORTAGE.pack(words[0], self.required, self.limit, *words[1:])

    @classmethod
    def unpack(cls, data: bytes) -> Shortage:
        """Read it. Whatever stands there can be read."""
        resource, required, limit, kernel, settings = _SHORTAGE.unpack(data)
        return cls(_text(resource), required, limit, _text(kernel), _text(settings))


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to an order.

    Attributes:
        answer: how the order ended.
        sequence: the order's number.
        tag: the kind of exception, for ``RAISED``.
        code: CUDA's error code, 0 for none.
        structure: the output's arrangement, such as ``(T,T)``; see :func:`describe`.
        exception: qualified name of the exception's type.
        message: its text. For people only: nothing is decided by it.
        tensors: the outputs' specs; after ``DRAW`` the inputs'.
        locations: where they lie, in the same order.
        drew: whether the call drew random numbers; only a reference says so.
        mutated: whether the call changes its inputs; only a reference says so.
        written_bytes: bytes of the outputs that are neither inputs nor weights; only a reference says so.
        shortage: what a launch lacked, for the tag ``RESOURCES`` where it is known.
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
    written_bytes: int = 0
    mutated: bool = False
    shortage: Shortage = Shortage()

    def pack(self) -> bytes:
        """The record as it travels."""
        head = _REPLY_HEAD.pack(
            _MAGIC,
            self.answer,
            self.sequence,
            self.tag,
            self.code,
            self.written_bytes,
            self.drew,
            self.mutated,
            _fit(self.structure, MAX_STRUCTURE_BYTES),
            _fit(self.exception, 128),
            _fit(self.message, 2048),
            self.shortage.pack(),
            len(self.tensors),
        )
        locations = self.locations or (Location(),) * len(self.tensors)
        body = b"".join(_pack_tensor(spec, location) for spec, location in zip(self.tensors, locations, strict=True))
        return (head + body).ljust(_REPLY_BYTES, b"\0")

    @classmethod
    def unpack(cls, data: bytes) -> Reply:
        """Read a record that cannot be trusted.

        Raises:
            ProtocolError: it is not one.
        """
        if len(data) != _REPLY_BYTES:
            raise ProtocolError(f"a reply of {len(data)} bytes instead of {_REPLY_BYTES}")
        magic, answer, sequence, tag, code, written, drew, mutated, structure, exception, message, shortage, count = (
            _REPLY_HEAD.unpack_from(data)
        )
        if magic != _MAGIC or count > MAX_TENSORS or drew > 1 or mutated > 1:
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
                tuple(location for _, location in tensors),
                bool(drew),
                written,
                bool(mutated),
                Shortage.unpack(shortage),
            )
        except ValueError as error:
            raise ProtocolError(f"a reply with an unknown number: {error}") from None


def _fit(text: str, size: int) -> bytes:
    return text.encode("utf-8", "replace")[:size]


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode("utf-8", "replace")


def _pack_tensor(spec: TensorSpec, location: Location) -> bytes:
    dtype = DTYPES.index(spec.dtype) if spec.dtype is not None else _OTHER
    device = _DEVICES.index(spec.device) if spec.device in _DEVICES else _OTHER
    # A tensor of more dimensions than travel is told by its true count, beyond MAX_DIMS.
    shape, stride = (((*numbers[:MAX_DIMS],) + (0,) * MAX_DIMS)[:MAX_DIMS] for numbers in (spec.shape, location.stride))
    return _TENSOR.pack(
        dtype,
        device,
        len(spec.shape),
        *shape,
        location.where,
        location.index,
        location.run,
        location.offset,
        *stride,
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
    """Memory that the process announces: a run of GPU allocations, at addresses one behind the other, or part of one.

    On a CPU it is the process's whole memory, one descriptor of size 0, announced once.

    Attributes:
        run: the run's number.
        total: how many allocations the whole run has.
        sizes: of the allocations in this record, in bytes.
        descriptors: what opens them. The receiver closes them.
    """

    run: int
    total: int
    sizes: tuple[int, ...]
    descriptors: tuple[int, ...]

    def pack(self) -> bytes:
        """Return the record as it travels; the descriptors travel beside it."""
        head = _EXPORT_HEAD.pack(_EXPORT_MAGIC, self.run, self.total, len(self.sizes))
        return head + struct.pack(f"={len(self.sizes)}Q", *self.sizes)

    @classmethod
    def unpack(cls, data: bytes, descriptors: list[int]) -> Export:
        """Read a record that cannot be trusted.

        Raises:
            ProtocolError: it is not one.
        """
        if len(data) < _EXPORT_HEAD.size:
            raise ProtocolError("an export that is cut off")
        magic, run, total, count = _EXPORT_HEAD.unpack_from(data)
        if magic != _EXPORT_MAGIC or not 0 < count <= min(total, MAX_EXPORTED) or total > MAX_RUN:
            raise ProtocolError("an export with a wrong head")
        if len(data) != _EXPORT_HEAD.size + 8 * count or len(descriptors) != count:
            raise ProtocolError("an export that does not hold what it announces")
        return cls(run, total, struct.unpack_from(f"={count}Q", data, _EXPORT_HEAD.size), tuple(descriptors))


def widened(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the float64 reference's counterpart: float64, complex128, or the dtype itself."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def describe(value: Any) -> tuple[str, list[Any]]:
    """The arrangement of an output and its leaves in order.

    ``T`` is a dense tensor (exactly :class:`torch.Tensor` or :class:`torch.nn.Parameter`, without attributes of
    its own that stand for a tensor's), ``(…)`` a tuple,
    ``[…]`` a list, ``{key:…}`` a dict with string keys in its own order, ``?Type`` anything else.
    """
    leaves: list[Any] = []
    return _described(value, 0, leaves), leaves


def _described(node: Any, depth: int, leaves: list[Any]) -> str:
    # No function within another: one that calls itself would keep the leaves alive until garbage is collected.
    kind = type(node)
    if (kind is torch.Tensor or kind is torch.nn.Parameter) and _is_plain(node):
        leaves.append(node)
        return "T"
    if depth < 8 and kind in (tuple, list):
        left, right = "()" if kind is tuple else "[]"
        return left + ",".join(_described(item, depth + 1, leaves) for item in node) + right
    if depth < 8 and kind is dict and all(type(key) is str for key in node):
        return "{" + ",".join(f"{key}:{_described(item, depth + 1, leaves)}" for key, item in node.items()) + "}"
    leaves.append(node)
    return f"?{kind.__name__}"


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not any(hasattr(torch.Tensor, name) for name in vars(tensor))


@dataclass(frozen=True, slots=True)
class Opening:
    """How a sealed process opens its device, before it knows any source.

    Attributes:
        device: ``cpu`` or ``cuda``.
        queues: how many hardware queues to open the device with; 0 for as many as the driver makes.
        launch_blocking: let each launch wait for its kernel's end.
    """

    device: str
    queues: int = 0
    launch_blocking: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """What a sealed process must know to load a source and construct its model.

    Attributes:
        source: the module's source.
        entry: the class to construct: ``ModelNew``, or ``Model`` in a reference.
        dtype: the floating dtype of weights and inputs that are float32 or float64.
        seed: set before construction.
        device_asserts: have Triton check its kernels' assertions.
        lines: have nvcc note which line of a source each instruction comes from.
        keeps_float64: leave what is float64 as it is.
        tf32: let products and convolutions of fp32 values use TF32.
        compiled: run the model under ``torch.compile``.
        built: where libraries lie that were compiled before; empty for none.
        architectures: of GPUs, for a builder to compile for; empty where there is none.
    """

    source: str
    entry: str
    dtype: torch.dtype
    seed: int
    keeps_float64: bool = False
    tf32: bool = False
    compiled: bool = False
    built: str = ""
    device_asserts: bool = False
    lines: bool = False
    architectures: str = ""


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """A shared buffer and the tensor that lives in it.

    The memory's descriptor travels beside the message. Outputs are not shared: of them only the form counts.

    Attributes:
        nbytes: size of the tensor's memory.
        dtype, shape, stride: of the tensor.
        device: ``cpu`` or ``cuda``.
    """

    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str


@dataclass(frozen=True, slots=True)
class Binding:
    """The shared buffers of the inputs or outputs, in order.

    Attributes:
        buffers: one for each tensor.
        arguments: for inputs: the arrangement of ``forward``'s arguments (:mod:`workers.judge.channel.arguments`).
        structure: for outputs: the arrangement that the reference returns.
    """

    buffers: tuple[BufferSpec, ...]
    arguments: Any = None
    structure: str = ""


@dataclass(frozen=True, slots=True)
class Draw:
    """Inputs to draw.

    Attributes:
        slots: the numbers under which the sets are held.
        seeds: one for each input set.
        on_device: whether tensors are made on the device, unless the problem says where.
        kind: of the numbers that inputs are drawn from, of :mod:`~workers.judge.channel.randomness`; empty for the
            problem's own.
        free: sets to let go of first.
        position: for kinds that have one: a number's, counted over all that may be changed and begun anew at the end.
    """

    slots: tuple[int, ...]
    seeds: tuple[int, ...]
    on_device: bool
    kind: str = ""
    free: tuple[int, ...] = ()
    position: int = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """A question to a reference: its answer to a set of inputs that it holds.

    Attributes:
        slot: the set's number.
        seed: the forward's.
        wide: ask the model in float64.
        nudge: how far each value is moved before, as a share; 0 for not at all.
        nudge_seed: what it is moved by.
        afresh: let go of earlier answers to the set before.
    """

    slot: int
    seed: int
    wide: bool = False
    nudge: float = 0.0
    nudge_seed: int = 0
    afresh: bool = False


@dataclass(frozen=True, slots=True)
class Examine:
    """A run under a tool of the CUDA toolkit.

    Attributes:
        tool: of compute-sanitizer, or ``ncu``.
        program: where it is.
        device: ``cpu`` or ``cuda``.
        job: the kernel's.
        problem: the problem's source.
        seconds: how long the run may take.
    """

    tool: str
    program: str
    device: str
    job: Job
    problem: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Testing:
    """Tests of a repository.

    Attributes:
        archive: the repository's files (:mod:`workers.judge.candidate.archive`).
        order: which tests, and how: JSON, for the program that runs them (:mod:`workers.testing.sealed`).
        sanitizer: where compute-sanitizer is, which is to watch the program; empty for no such.
    """

    archive: str
    order: str
    sanitizer: str


@dataclass(frozen=True, slots=True)
class Release:
    """Sets of inputs to let go of.

    Attributes:
        slots: their numbers.
        all: let go of every set, forget all memory that was announced, and give back what is not in use. What timed
            calls use stays.
    """

    slots: tuple[int, ...] = ()
    all: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    """An order as the sealed process receives it."""

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
        signed = seed if seed < 2**63 else seed - 2**64
        head = _COMMAND.pack(_MAGIC, order, sequence, signed, payload is not None)
        send_with_fds(channel, head, attached)
    finally:
        if memory >= 0:
            os.close(memory)


def receive_command(channel: socket.socket) -> Command | None:
    """Wait for an order; None when the judge has gone. Runs in the candidate."""
    data, fds = receive_with_fds(channel, _COMMAND.size)
    if not data:
        return None
    _, order, sequence, seed, has_payload = _COMMAND.unpack_from(data)
    payload = None
    if has_payload:
        memory = fds.pop(0)
        os.lseek(memory, 0, os.SEEK_SET)
        with os.fdopen(memory, "rb") as stream:
            payload = pickle.load(stream)  # noqa: S301 -- written by the judge, for the candidate alone
    return Command(Order(order), sequence, seed, payload, tuple(fds))


def receive_record(channel: socket.socket) -> Reply | Export | None:
    """Wait for a reply or an export; None when the other side has gone.

    Raises:
        ProtocolError: it sent something else.
    """
    # One byte more than a reply, so that a longer packet is seen as such instead of being cut to fit.
    try:
        data, fds = receive_with_fds(channel, _REPLY_BYTES + 1)
    except ConnectionResetError:
        return None
    try:
        if len(data) >= _EXPORT_HEAD.size and int.from_bytes(data[:4], sys.byteorder) == _EXPORT_MAGIC:
            export = Export.unpack(data, fds)
            fds = []
            return export
        return Reply.unpack(data) if data else None
    finally:
        for descriptor in fds:  # nobody asked for them
            os.close(descriptor)
