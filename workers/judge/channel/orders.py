"""The judge's orders to a sealed process, and their payloads.

A larger payload (the job, the buffers) is sent as a pickle in a memfd. Only the judge writes such a pickle, and only
the sealed process loads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from workers.judge.channel.tensors import View


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
    """Make one timed call: write READY, wait for GO in the shared flags, take the seed from there, then continue as in
    RUN. On a GPU an empty kernel precedes the forward."""
    TIME_OVERHEAD = 8
    """Make a timed call without a forward: deliver the last outputs again."""
    ENQUEUE = 10
    """Enqueue timed calls on a GPU, one for each :class:`Call` of the payload. For each the stream waits for GO, runs
    the forward and writes DONE. The calls are numbered from the order's own number on. Each is answered as soon as it
    is enqueued."""
    SET_UP = 29
    """Call the model's ``setup()`` with the form of the inputs (:class:`Binding`). A mismatch if it declares none."""
    EVALUATE = 30
    """Put the model in ``eval()`` mode."""
    PROFILE = 12
    """Make one call under a profiler. Write the names of the executed kernels to the shared memory sent with the
    order."""
    DIFFERENTIATE = 31
    """Reference: find the gradients of a stored input set (a pair of its number and True), and write the fields of
    :class:`Gradients` to the scalar page. From then on inputs come with upstream gradients, and answers with
    gradients. With False instead, calls only go forward, in grad mode."""
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
    CHECK = 32
    """Reference: ask the problem's ``check()`` about outputs. The payload has the number of the input set, the outputs'
    structure, and the specs of the shared buffers sent with the order: the reference's outputs, and then the ones to
    check. A refusal is a mismatch with the check's words as the message."""
    ARENA = 24
    """Reference: store inputs and answers in this memory of the judge, as far as they fit."""
    DESCRIBE = 28
    """Describe the model's parameters in the reply's message (:mod:`workers.judge.channel.parameters`)."""
    MOVE = 33
    """Give random values to the parameters that are gates, and to the state that is reset to one number, the same in
    each process. If the seed is 0, give them their own values again. The reply's message has the names of the state."""
    EFFECTS = 34
    """Reference: find the parameters on which the outputs for an input set (its number) do not depend because of such
    gates. The reply's message has their names, one in each line."""
    REST = 20
    """Drop the model, so that the process can serve another shape or evaluation. The next one has the order's seed."""


class Call(IntEnum):
    """The kinds of timed calls."""

    PLAIN = 1
    """A forward."""
    OVERHEAD = 2
    """An empty kernel instead of a forward. The outputs of the call before are delivered again."""
    IN_TURN = 3
    """An empty kernel before the forward."""


@dataclass(frozen=True, slots=True)
class Member:
    """A process's place in a group: its rank among ``world`` processes, and the UUIDs of the group's GPUs by rank.

    ``group`` is the name that its processes share.
    """

    rank: int
    world: int
    group: str
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Opening:
    """The settings with which a sealed process opens its device ``cpu`` or ``cuda``, before it receives any source.

    ``queues`` is the number of hardware queues, or 0 for the driver's default. ``launch_blocking`` makes each launch
    wait for its kernel's end. ``member`` is the process's place in a group, which it joins before the reply.
    """

    device: str
    queues: int = 0
    launch_blocking: bool = False
    member: Member | None = None


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
        backward: compute gradients in a run under a tool.
        steps: number of forwards in each call, without a reset of buffers between them.
        tree: text of the tree that the source names (:mod:`kqueue.trees`), or empty.
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
    backward: bool = False
    steps: int = 1
    tree: str = ""


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
class Gradients:
    """The gradients that each call computes. Gradients of inputs that require one precede gradients of weights.

    Attributes:
        names: names of all.
        weights: names and shapes of the reference's parameters that require a gradient.
        outputs: numbers of the outputs with an upstream gradient. Empty if calls only go forward, in grad mode.
        delivered: numbers of the gradients that are delivered after the outputs.
        absent: numbers of those that the reference does not have.
    """

    names: tuple[str, ...]
    weights: tuple[tuple[str, tuple[int, ...]], ...]
    outputs: tuple[int, ...]
    delivered: tuple[int, ...]
    absent: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Binding:
    """The shared buffers of the inputs or outputs, in order.

    Attributes:
        arguments: for inputs, the arrangement of ``forward``'s arguments (:mod:`workers.judge.channel.arguments`).
        differentiates: for inputs, whether ``forward`` is called in grad mode.
        views: for inputs, the arguments' tensors as views of the buffers (:mod:`workers.judge.channel.layout`).
        structure: for outputs, the structure of the reference's output (see ``describe``).
        lasting: numbers of the outputs that the reference returns from memory of its model. Other outputs are marked
            as not written before the next call.
        resets: for inputs, the names of registered buffers that are reset before each call.
        compared: number of the first of these buffers that are delivered after the outputs.
        gradients: for inputs, the gradients that each call computes, or None for none.
    """

    buffers: tuple[BufferSpec, ...]
    arguments: Any = None
    views: tuple[View, ...] = ()
    differentiates: bool = False
    structure: str = ""
    lasting: tuple[int, ...] = ()
    resets: tuple[str, ...] = ()
    compared: int = 0
    gradients: Gradients | None = None


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
        nudge: approximate relative change of each input value before the call, or 0 for no change. Small values change
            more, in proportion to the usual size.
        is_relative: change each value in proportion to itself only, and whole numbers not at all.
        nudge_seed: random seed of these changes.
        afresh: free earlier answers to the set first.
        evaluates: use the model in ``eval()`` mode, and copies of the inputs.
        leaves: free the set's inputs after the call.
        threads: number of threads, in marked memory: 0 for more than usual. None changes neither.
    """

    slot: int
    seed: int
    wide: bool = False
    nudge: float = 0.0
    nudge_seed: int = 0
    afresh: bool = False
    is_relative: bool = False
    evaluates: bool = False
    leaves: bool = False
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Examine:
    """A run under a tool of the CUDA toolkit.

    Attributes:
        tool: a tool of compute-sanitizer, or ``ncu``.
        program: path of the tool's executable.
        device: ``cpu`` or ``cuda``.
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
