"""Messages between the judge and a sealed process, over a ``SOCK_SEQPACKET`` socket.

The judge sends commands: a fixed header with file descriptors. A larger payload (the job, the buffers) is sent as a
pickle in a memfd. Only the judge writes such a pickle, and only the sealed process loads it.

The sealed process, a candidate or a reference, sends two kinds of records. A reply has a fixed size. An export
announces memory of the process, with the descriptors that open it. The judge checks every number and length against
its bound before use. The location of an output is a claim until the judge has opened that memory
(:mod:`workers.judge.channel.buffers`).
"""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

import torch

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
_REPLY_HEAD = struct.Struct(f"=IIQqqQBB{MAX_STRUCTURE_BYTES}s128s2048s{_SHORTAGE.size}sI")
_TENSOR = struct.Struct("=BBH8qBBQq8q")
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


class Order(IntEnum):
    """The judge's orders. Those marked "reference" or "builder" are only for these roles."""

    OPEN = 9
    """Open the device as an :class:`Opening` says. On a CPU the process announces its memory before the reply."""
    LOAD = 1
    """Receive the job (:class:`Job`) and import its source."""
    CONSTRUCT = 2
    """Construct the model and move it to the device."""
    BIND_INPUTS = 3
    """Map the shared inputs."""
    WARM_UP = 4
    """Compile the kernels of the first call without launching them. Reference: load the operations that variants of
    large inputs need."""
    BIND_OUTPUTS = 5
    """Receive the outputs' form."""
    RUN = 6
    """Call forward on the shared inputs. The reply has the locations of the outputs."""
    TIME = 7
    """Make one timed call: write READY, wait for GO in the shared flags, then continue as in RUN. On a GPU an empty
    kernel precedes the forward."""
    TIME_OVERHEAD = 8
    """Make a timed call without a forward: deliver the last outputs again."""
    ENQUEUE = 10
    """Enqueue one timed call on a GPU: the stream waits for GO, runs the forward and writes DONE. The reply comes as
    soon as all is enqueued."""
    ENQUEUE_OVERHEAD = 11
    """Enqueue a timed call with an empty kernel instead of a forward."""
    ENQUEUE_IN_TURN = 14
    """Enqueue a timed call with an empty kernel before the forward."""
    PROFILE = 12
    """Make one call under a profiler. Write the names of the executed kernels to the shared memory sent with the
    order."""
    BUILD = 13
    """Builder: receive the job, import its source, and store the libraries that it compiled."""
    INITIAL = 15
    """Reference: call ``get_init_inputs()`` and write the return value to the scalar page."""
    TAKEN = 17
    """Reference: write to the scalar page the weights' size and the process's peak GPU memory, both in bytes, and the
    number of drawn values."""
    ALLOW = 18
    """Limit the process's GPU memory to this number of bytes from now on."""
    DRAW = 16
    """Reference: call ``get_inputs()`` for each input set of the payload (:class:`Draw`), and store the return values.
    The reply has the locations of the tensors, set by set. Their arrangement is on the scalar page. The answer is a
    mismatch if a variant cannot be made."""
    RELEASE = 21
    """Reference: free input sets and the answers to them (:class:`Release`)."""
    WIDEN = 19
    """Reference: make a copy of the model in float64. Later questions can use it."""
    ANSWER = 27
    """Reference: answer the questions of the payload (a tuple of :class:`Ask`). Each reply has the locations of the
    outputs."""
    EXAMINE = 22
    """Start a program for the kernel and its problem under a tool (:class:`Examine`). The program pauses before it
    opens the device."""
    FINISH = 23
    """Resume that program, and wait for its end."""
    REPORT = 25
    """Write the tool's output to the shared memory sent with the order."""
    TEST = 26
    """Become a program that runs tests of a repository (:class:`Testing`) and reports events on the socket sent with
    the order. The process obeys no further orders."""
    ARENA = 24
    """Reference: store inputs and answers in this memory of the judge, as far as they fit."""
    REST = 20
    """Reference: free unused memory. The process can serve another evaluation later."""


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
        """Return the binary form, which is part of a reply."""
        texts = _fit(self.resource, 32), _fit(self.kernel, 64), _fit(self.settings, 256)
        return _SHORTAGE.pack(texts[0], self.required, self.limit, *texts[1:])

    @classmethod
    def unpack(cls, data: bytes) -> Shortage:
        """Parse the binary form. Any bytes of the right size are valid."""
        resource, required, limit, kernel, settings = _SHORTAGE.unpack(data)
        return cls(_text(resource), required, limit, _text(kernel), _text(settings))


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to an order. Only a reference sets ``drew``, ``mutated`` and ``written_bytes``.

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
        mutated: whether the call changes its inputs.
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
    written_bytes: int = 0
    mutated: bool = False
    shortage: Shortage = Shortage()

    def pack(self) -> bytes:
        """Return the binary form."""
        head = _REPLY_HEAD.pack(
            *(_MAGIC, self.answer, self.sequence, self.tag, self.code, self.written_bytes, self.drew, self.mutated),
            *(_fit(self.structure, MAX_STRUCTURE_BYTES), _fit(self.exception, 128), _fit(self.message, 2048)),
            *(self.shortage.pack(), len(self.tensors)),
        )
        locations = self.locations or (Location(),) * len(self.tensors)
        body = b"".join(_pack_tensor(spec, location) for spec, location in zip(self.tensors, locations, strict=True))
        return (head + body).ljust(REPLY_BYTES, b"\0")

    @classmethod
    def unpack(cls, data: bytes) -> Reply:
        """Parse an untrusted record.

        Raises:
            ProtocolError: the record is malformed.
        """
        if len(data) != REPLY_BYTES:
            raise ProtocolError(f"a reply of {len(data)} bytes instead of {REPLY_BYTES}")
        magic, answer, sequence, tag, code, written, drew, mutated, structure, exception, message, shortage, count = (
            _REPLY_HEAD.unpack_from(data)
        )
        if magic != _MAGIC or count > MAX_TENSORS or drew > 1 or mutated > 1:
            raise ProtocolError("a reply with a malformed header")
        try:
            tensors = [_unpack_tensor(data, _REPLY_HEAD.size + i * _TENSOR.size) for i in range(count)]
            return cls(
                *(Answer(answer), sequence, Tag(tag), code, _text(structure), _text(exception), _text(message)),
                *(tuple(spec for spec, _ in tensors), tuple(location for _, location in tensors)),
                *(bool(drew), written, bool(mutated), Shortage.unpack(shortage)),
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
        """Parse an untrusted record.

        Raises:
            ProtocolError: the record is malformed.
        """
        if len(data) < _EXPORT_HEAD.size:
            raise ProtocolError("a truncated export")
        magic, run, total, count = _EXPORT_HEAD.unpack_from(data)
        if magic != _EXPORT_MAGIC or not 0 < count <= min(total, MAX_EXPORTED) or total > MAX_RUN:
            raise ProtocolError("an export with a malformed header")
        if len(data) != _EXPORT_HEAD.size + 8 * count or len(descriptors) != count:
            raise ProtocolError("an export whose number of allocations does not match its header")
        return cls(run, total, struct.unpack_from(f"={count}Q", data, _EXPORT_HEAD.size), tuple(descriptors))


@dataclass(frozen=True, slots=True)
class Opening:
    """The settings with which a sealed process opens its device ``cpu`` or ``cuda``, before it receives any source.

    ``queues`` is the number of hardware queues, or 0 for the driver's default. ``launch_blocking`` makes each launch
    wait for its kernel's end.
    """

    device: str
    queues: int = 0
    launch_blocking: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """A source, and the settings with which a sealed process loads it and constructs its model.

    Attributes:
        entry: the class to construct: ``ModelNew``, or ``Model`` in a reference.
        dtype: the floating dtype to which weights and inputs of float32 or float64 are converted.
        seed: random seed, set before construction.
        device_asserts: make Triton check its kernels' assertions.
        lines: make nvcc record the source line of each instruction.
        keeps_float64: do not convert float64 tensors.
        tf32: allow TF32 in products and convolutions of fp32 values.
        compiled: run the model under ``torch.compile``.
        built: path of precompiled libraries. Empty for none.
        architectures: GPU architectures for which a builder compiles. Empty for none.
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
    """A shared buffer and its tensor.

    The memory's descriptor is sent with the message. Outputs are not shared, so their specs describe only the form.

    ``device`` is ``cpu`` or ``cuda``.
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
        arguments: for inputs, the arrangement of ``forward``'s arguments (:mod:`workers.judge.channel.arguments`).
        structure: for outputs, the structure of the reference's output (see ``describe``).
    """

    buffers: tuple[BufferSpec, ...]
    arguments: Any = None
    structure: str = ""


@dataclass(frozen=True, slots=True)
class Draw:
    """Input sets to draw.

    Attributes:
        slots: the numbers under which the sets are stored.
        seeds: one random seed for each input set.
        on_device: whether tensors are created on the device by default.
        kind: kind of values, from :mod:`~workers.judge.channel.randomness`. Empty for the problem's own values.
        free: sets to free first.
        position: for kinds that change one value, its index among all changeable values, modulo their number.
    """

    slots: tuple[int, ...]
    seeds: tuple[int, ...]
    on_device: bool
    kind: str = ""
    free: tuple[int, ...] = ()
    position: int = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """A question to a reference: its output for a stored input set.

    Attributes:
        slot: the set's number.
        seed: random seed of the forward.
        wide: use the model in float64.
        nudge: approximate relative change of each input value before the call, or 0 for no change.
        nudge_seed: random seed of these changes.
        afresh: free earlier answers to the set first.
    """

    slot: int
    seed: int
    wide: bool = False
    nudge: float = 0.0
    nudge_seed: int = 0
    afresh: bool = False


def widened(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that replaces a dtype in the float64 reference: float64, complex128, or the dtype itself."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


@dataclass(frozen=True, slots=True)
class Examine:
    """A run under a tool of the CUDA toolkit.

    Attributes:
        tool: a tool of compute-sanitizer, or ``ncu``.
        program: path of the tool's executable.
        device: ``cpu`` or ``cuda``.
        problem: the problem's source.
        seconds: time limit of the run.
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
        order: the tests and their options, as JSON for the program that runs them (:mod:`workers.testing.sealed`).
        sanitizer: path of the compute-sanitizer under which the tests run. Empty to run without it.
    """

    archive: str
    order: str
    sanitizer: str


@dataclass(frozen=True, slots=True)
class Release:
    """Input sets to free.

    ``all`` frees every set, forgets all announced memory, and returns unused memory to the device, except memory of
    timed calls.
    """

    slots: tuple[int, ...] = ()
    all: bool = False
