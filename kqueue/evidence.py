"""The typed parts of an outcome: measurements, facts and evidence, and what each category must tell.

A judge builds these models, so an unknown field or a wrong type is an error there. Rows of the database may come
from another version of kqueue: :meth:`kqueue.contract.Verdict.load` reads them and tolerates what it does not know.

Units stand in the names: ``_s`` seconds, ``_ms`` milliseconds, ``_bytes`` bytes, ``_gbs`` 10^9 bytes a second. In the
JSON form of :class:`Facts` and :class:`Evidence` a field without a value is absent; inside the other models it is null.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, field_validator

from kqueue.categories import CATEGORIES, Blame, Category


class Part(BaseModel):
    """The base of all models of an outcome: immutable, without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with changed fields. Unlike pydantic's own method it validates the changes."""
        copy = super().model_copy(deep=deep)
        return type(self).model_validate(dict(copy) | dict(update)) if update else copy


def json_number(value: float) -> float | str:
    """Return ``value`` as JSON can hold it: ``NaN``, ``Infinity`` and ``-Infinity`` become text."""
    if math.isfinite(value):
        return float(value)
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


#: A number that a candidate influences, so it may be NaN or infinite.
Figure = Annotated[float, PlainSerializer(json_number, return_type=float | str, when_used="json")]


def _is_absent(value: object) -> bool:
    return value is None


#: The default of a field that is absent from the JSON form where it has no value.
_ABSENT: Any = Field(default=None, exclude_if=_is_absent)


# Time --------------------------------------------------------------------------------------------------


class Clocks(Part):
    """The clocks of a GPU after the timed calls. Empty on a CPU."""

    sm_mhz: float | None = _ABSENT
    """Clock of the processors, in MHz."""
    memory_mhz: float | None = _ABSENT
    """Clock of the memory, in MHz."""
    throttle_reasons: str | None = _ABSENT
    """NVML's bit mask of all reasons for lower clocks that were seen, in hexadecimal."""


class Histogram(Part):
    """How many timed calls fell into each of several bins of equal width."""

    low_ms: float
    """Lower end of the first bin: the shortest call."""
    high_ms: float
    """Upper end of the last bin. Calls beyond it count in that."""
    counts: tuple[int, ...]
    """Number of calls in each bin."""


class Measurement(Part):
    """The time of one call. All times are in milliseconds, with the null subtracted."""

    basis: Literal["gpu_clock", "cpu_clock"]
    """``gpu_clock``: CUDA events of the judge around work that was enqueued ahead. ``cpu_clock``: the judge's CPU clock
    from the start of a call to its answer, launch and wait included. It times the ``cpu`` lane, and a ``forward`` that
    waits for the GPU."""
    count: Annotated[int, Field(ge=1)]
    """Timed calls that count."""
    discarded: Annotated[int, Field(ge=0)] = 0
    """Timed calls that do not count, because the device was throttled."""
    precision: float | None = None
    """Half the width of the median's 95 % confidence interval, as a share of the median."""
    yardstick_ms: float | None = None
    """Median time of the judge's own work inside a call. It tells two devices apart, or one device at two times."""
    median_ms: float
    """Median."""
    q1_ms: float
    """First quartile."""
    q3_ms: float
    """Third quartile."""
    mean_ms: float
    """Mean."""
    std_ms: float
    """Standard deviation."""
    min_ms: float
    """Shortest call."""
    max_ms: float
    """Longest call."""
    null_ms: float
    """Median time of the same round trip without a ``forward``. It is subtracted from all times above."""
    cold_l2: bool
    """True if the GPU's L2 cache was flushed before each call."""
    clocks: Clocks = Clocks()
    """Clocks of the GPU, as far as it tells them."""
    histogram: Histogram | None = None
    """The calls, up to where they are far longer than most. Null where an older version measured."""


class BaselineError(Part):
    """A baseline that could not be taken."""

    error: str
    """The reason, in one line."""


class Drift(Part):
    """A change of the device since the cached baseline was taken, by the judge's own work inside a call."""

    was_ms: float
    """Median time of that work when the baseline was taken, in milliseconds."""
    is_ms: float
    """Median time of that work beside this kernel, in milliseconds."""


class Floor(Part):
    """The time that the GPU's memory needs for the kernel's inputs and outputs."""

    bytes_in: int
    """Size of all inputs, in bytes."""
    bytes_out: int
    """Size of all outputs that a kernel must write, in bytes."""
    bandwidth_gbs: float
    """Bandwidth of the memory at its peak, in 10^9 bytes a second."""
    floor_ms: float
    """Time to read the inputs once and write the outputs once. A kernel that needs a part of its inputs may be
    faster."""
    floor_out_ms: float
    """Time to write the outputs once. No kernel is faster."""
    bytes_needed: int | None = _ABSENT
    """Bytes of the inputs that the answer depends on, by what was tried, at least, less what a cache may hold of them.
    Absent where the kernel took long enough to read all inputs."""
    floor_needed_ms: float | None = _ABSENT
    """Time to read these bytes and write the outputs."""


# Values ------------------------------------------------------------------------------------------------


class ErrorFigures(Part):
    """The error of a kernel's outputs: the worst of all outputs and input sets."""

    max_abs_error: Figure
    """Largest absolute error of a value."""
    max_rel_error: Figure
    """Largest relative error of a value."""
    relative_norm: Figure
    """``|output - reference| / |reference|``, in the Euclidean norm."""
    error_ratio: Figure | None
    """Distance of the output from the float64 reference, over the distance of the reference itself. Where there is no
    float64 reference: distance from the reference, over how far rounding errors of the inputs move it. Null where
    neither is known."""
    precision_downgrade: bool
    """True if the error is that of a lower precision than the reference's."""
    strict_correct: bool
    """The verdict of the ``strict`` comparison: whether it holds for all of them."""
    kernelbench_correct: bool | None
    """The verdict of KernelBench's ``torch.allclose`` on the problem's own inputs. Null for other inputs."""


class GivenTolerance(Part):
    """A tolerance in the place of the dtype's: ``|out - ref| <= atol + rtol * |ref|`` for every value."""

    atol: float
    """Absolute part."""
    rtol: float
    """Relative part."""
    by: Literal["settings", "problem"]
    """Who gave it: the evaluation's settings, or the problem."""


class WrongPlace(Part):
    """One wrong value of an output."""

    index: tuple[int, ...]
    """Its index in the output tensor. The real and imaginary parts of a complex value have one index more."""
    expected: Figure
    """The reference's value."""
    got: Figure
    """The kernel's value."""


class WrongMap(Part):
    """Where in an output wrong values lie: coarsely, all dimensions but the last taken as rows."""

    rows: int
    """Rows of the output: the product of all dimensions but the last."""
    columns: int
    """Values of a row. The real and imaginary parts of a complex value are two."""
    shares: Annotated[tuple[Annotated[str, Field(pattern=r"^[0-9]{1,16}$")], ...], Field(min_length=1, max_length=16)]
    """The output in at most 16 by 16 cells, a text for each row of cells with a digit for each cell: ``0`` where no
    value is wrong, ``9`` where all are, ``1`` to ``8`` for the eighths between. Of ``n`` cells cell ``i``, from 0,
    begins at ``i * rows // n`` or ``i * columns // n``."""


class Shortage(Part):
    """A launch that asked a GPU for more than it has, as Triton tells it."""

    resource: str
    """What is short: ``shared memory`` in bytes, ``threads`` of a block, ``tensor memory`` in columns."""
    required: int
    """How much the launch asks for."""
    limit: int
    """How much there is."""
    kernel: str
    """Name of the kernel; empty if unknown."""
    settings: str
    """The kernel's constants and options that a change may begin with, such as ``BLOCK=128, num_stages=4``."""


# The source and who did the work -----------------------------------------------------------------------


class Severity(StrEnum):
    """The weight of a finding."""

    CHEAT = "cheat"
    """Serves nothing else in a kernel."""
    SUSPICIOUS = "suspicious"
    """Has honest uses too."""
    NOTE = "note"
    """Is usual."""


class Finding(Part):
    """A label that a static rule gave to the source. It is no proof."""

    rule: str
    """Name of the rule."""
    severity: Severity
    """``cheat``, ``suspicious`` or ``note``."""
    line: int | None
    """Line of the source, from 1. Null where the rule names none."""
    evidence: str
    """The text that the rule matched, shortened, control characters replaced."""
    by: Literal["kqueue", "kernelguard"]
    """Whose rule it is."""
    meaning: str
    """What the rule looks for, in one line."""


class LibraryKernel(Part):
    """A library's GPU kernel that ran."""

    name: str
    """Name of the kernel."""
    share: float
    """Its share of the call's GPU time, 0 to 1."""


class Provenance(Part):
    """The origin of the code that did a call's work on the GPU. Shares are of the call's GPU time, 0 to 1."""

    own_share: float
    """Share of the source's own kernels."""
    own: tuple[str, ...]
    """Names of the source's own kernels that ran, the most expensive first."""
    library: tuple[LibraryKernel, ...]
    """Kernels of libraries that ran, the most expensive first."""
    unclear_share: float
    """Share of kernels whose names are neither in the source nor known as a library's."""
    unclear: tuple[str, ...]
    """Names of these kernels."""
    copies_share: float
    """Share of copies and fills."""
    decoy: bool
    """True if the source's own kernels did practically none of the work."""
    why: str
    """The result in one line."""
    basis: str
    """The source of these figures: the candidate's own profile, which a kernel could forge."""


class Build(Part):
    """Compilation of the extensions that the source builds when it is imported."""

    where: Literal["builder", "candidate", "store"]
    """The process that compiled: the sealed builder, or the candidate itself. ``store`` if nothing was compiled: the
    builder of an earlier evaluation of the same source has done it, or a compiler has refused it then."""
    libraries: int
    """Number of libraries that the builder compiled."""
    seconds: float
    """Time that the builder took, or handing over what is kept, in seconds."""
    peak_bytes: int
    """Largest private memory of the builder's process tree, in bytes."""
    skipped: str | None = _ABSENT
    """The reason why the candidate had to compile, where the builder gave up."""
    earlier_seconds: float | None = _ABSENT
    """Time that the builder of the earlier evaluation took, in seconds, where its build is used."""
    key: str | None = _ABSENT
    """The hash of all that the build depends on, under which it is kept; absent where builds are not kept."""


# Examinations ------------------------------------------------------------------------------------------
# A tool runs beside the kernel, in one sealed process: what it says is a claim, as a candidate's own profile is.


class SanitizerFinding(Part):
    """What compute-sanitizer found at one place of the code, all threads together."""

    kind: str
    """What is wrong there, such as ``Invalid __global__ read of size 16 bytes``."""
    kernel: str | None = None
    """Name of the kernel. Null where the tool names none."""
    file: str | None = None
    """Name of the source file. Null where the kernel was compiled without lines."""
    line: int | None = None
    """Line in that file, from 1."""
    block: tuple[int, int, int] | None = None
    """Block of the first thread that it was seen of."""
    thread: tuple[int, int, int] | None = None
    """That thread, within its block."""
    address: str | None = None
    """The address that it used, in hexadecimal."""
    size_bytes: int | None = None
    """Size of the access."""
    allocation_bytes: int | None = None
    """Size of the allocation that lies nearest."""
    distance_bytes: int | None = None
    """How far from that allocation it is: behind its end, or, where negative, before its beginning. 0 where it begins
    within."""
    detail: str = ""
    """The tool's further words on the first."""
    count: int
    """How often it was told."""


class Sanitized(Part):
    """One run under a tool of compute-sanitizer."""

    tool: str
    """The tool."""
    errors: int | None = None
    """Number of errors as the tool counts them, each thread for itself. Null where it did not get so far."""
    findings: tuple[SanitizerFinding, ...] = ()
    """What was found, in the order of the code's first failure, at most 32 places."""
    error: str | None = None
    """The reason why the run says nothing, or not all."""
    seconds: float
    """How long it took, in seconds."""


class Stall(Part):
    """A reason for which warps waited."""

    reason: str
    """The reason, by Nsight Compute's name, such as ``long_scoreboard`` (waiting for global memory)."""
    share: float
    """Its share of all waiting, 0 to 1."""


class SourceLine(Part):
    """A line of a source at which warps were seen."""

    file: str
    """Name of the file, such as ``kernel.py``."""
    line: int
    """Number of the line, from 1."""
    share: float
    """How many of the warps that were seen in the kernel were there, 0 to 1."""
    text: str | None = None
    """The line, where its file is known."""


class KernelProfile(Part):
    """What one kernel of a call does, all its launches in that call together. Shares are 0 to 1."""

    name: str
    """Name of the kernel."""
    launches: int
    """Number of launches."""
    duration_ms: float
    """Time on the GPU, in milliseconds, alone and with cold caches."""
    grid: tuple[int, int, int] | None = None
    """Blocks of the longest launch. What follows is of that launch too."""
    block: tuple[int, int, int] | None = None
    """Threads of a block."""
    registers: int | None = None
    """Registers of a thread."""
    shared_bytes: int | None = None
    """Shared memory of a block, in bytes."""
    spills: int | None = None
    """Instructions that move registers to memory or back."""
    occupancy: float | None = None
    """Warps that were there, as a share of those that fit."""
    occupancy_limit: str | None = None
    """What keeps more blocks from fitting: ``registers``, ``shared memory``, ``warps`` or ``blocks``."""
    dram_bytes: float | None = None
    """Bytes read from and written to the GPU's memory."""
    dram_gbs: float | None = None
    """Bandwidth that was reached, in 10^9 bytes a second."""
    dram_share: float | None = None
    """That as a share of the memory's peak."""
    compute_share: float | None = None
    """Use of the processors' busiest unit."""
    tensor_share: float | None = None
    """Use of the tensor cores."""
    gflops: float | None = None
    """Operations in fp32 and fp64 outside of the tensor cores, in 10^9 a second. A multiplication with an addition
    counts as two."""
    l2_hits: float | None = None
    """Share of accesses that the L2 cache had."""
    stalls: tuple[Stall, ...] = ()
    """Why warps waited, the three most frequent reasons."""
    lines: tuple[SourceLine, ...] = ()
    """The first five lines by how many warps were seen there. Told of the three longest kernels, where their compiler
    has noted lines, as Triton and nvcc do here."""


class Profile(Part):
    """What the kernels of one call do."""

    by: Literal["ncu", "cupti"]
    """``ncu`` for Nsight Compute's counters. ``cupti`` where they may not be read: names, launches and times alone."""
    kernels: tuple[KernelProfile, ...] = ()
    """The kernels, the longest first, at most 32."""
    peak_gbs: float | None = None
    """Peak bandwidth of the GPU's memory at the clock of this run, in 10^9 bytes a second."""
    peak_gflops: float | None = None
    """Peak of its processors in fp32 without tensor cores, at the clock of this run, in 10^9 operations a second."""
    error: str | None = None
    """The reason why it says nothing, or not all."""
    seconds: float
    """How long it took, in seconds."""


# Tests -------------------------------------------------------------------------------------------------


class Tests(Part):
    """What pytest said in the sealed process of a repository's tests: a claim of theirs."""

    words: str
    """One JSON object a line, as `workers/testing/child.py` lists them: reports above all."""
    findings: str | None = _ABSENT
    """The beginning of what compute-sanitizer wrote. None where it was not asked for."""


# The place ---------------------------------------------------------------------------------------------


#: True where a measure of the seal holds, else the reason why it does not.
Measure = Literal[True] | str


class Isolation(Part):
    """The seal around the candidate. Each measure is true, or tells why it does not hold."""

    level: Literal["none", "basic", "strong", "full"]
    """The level that the measures add up to."""
    view: Literal["host", "rebuilt"]
    """``rebuilt`` where candidates see a private view of the file system, else ``host``."""
    torch: str | None = None
    """Version of torch in the candidate's process."""
    own_uid: Measure
    """The candidate has a user id of its own."""
    no_capabilities: Measure
    """It has no capabilities."""
    no_new_privs: Measure
    """It cannot gain privileges by executing a file."""
    limits: Measure
    """Resource limits bound it."""
    seccomp: Measure
    """A filter bounds its system calls."""
    files: Measure
    """Landlock bounds the files that it may read and write."""
    mounts: Measure
    """Its files, also in ``/tmp``, ``/var/tmp`` and ``/dev/shm``, are in a file system of its own, of a fixed size."""
    tcp: Measure
    """Landlock denies TCP."""
    devices: Measure
    """Landlock bounds the devices that it may control."""
    scopes: Measure
    """Landlock keeps it from signals and abstract sockets of others."""
    gpu_nodes: Measure
    """It sees the device nodes of its own GPU only."""
    user_namespace: Measure
    """It has a user namespace of its own, where the fleet is not root."""
    network_namespace: Measure
    """It has a network namespace of its own."""
    ipc_namespace: Measure
    """It has an IPC namespace of its own."""
    cgroup_memory: Measure
    """A control group bounds its memory."""
    cgroup_processes: Measure
    """A control group bounds its processes."""
    cgroup_kill: Measure
    """A control group ends all of its processes at once."""


class InputTensor(Part):
    """A tensor among the inputs of one call, as the problem makes it."""

    shape: tuple[int, ...]
    """Its shape."""
    dtype: str
    """Its dtype in the evaluation's precision, such as ``float32``."""


class ReferenceProcess(Part):
    """The process that ran the reference."""

    kept: bool
    """True if it had served an earlier evaluation of the problem."""
    uses: int
    """Number of evaluations that it had served, this one included."""
    replaced: str | None = _ABSENT
    """The reason why a kept process was replaced by a new one."""


class GpuMemory(Part):
    """What each process of the evaluation might take of the GPU's memory, in bytes, its CUDA context left out."""

    inputs_bytes: int
    """Size of the inputs of one call."""
    outputs_bytes: int | None = None
    """Size of its outputs. Null where the reference has not answered."""
    weights_bytes: int
    """Size of the reference's weights."""
    judge_bytes: int
    """What the judge may take."""
    reference_bytes: int
    """What the reference may take."""
    candidate_bytes: int
    """What the kernel is promised, weights and outputs included."""
    used_bytes: int | None = None
    """The most that the processes of the evaluation were seen to hold together, contexts included. Null where that was
    not looked at: small problems, and hosts whose driver does not tell."""


class Environment(Part):
    """The device and software on which an attempt ran."""

    device: str
    """Name of the GPU or CPU."""
    driver: str | None = None
    """Version of the GPU's driver."""
    memory_bytes: int | None = None
    """Memory of the GPU, in bytes."""
    cuda: str | None = None
    """Version of CUDA that torch was built with. Null on a CPU."""
    torch: str
    """Version of torch."""
    triton: str | None = None
    """Version of Triton."""
    python: str
    """Version of Python."""
    host: str
    """Name of the host."""
    os: str | None = None
    """Name and release of the operating system."""
    kqueue: str | None = None
    """Version of kqueue that judged. Null where one judged that did not tell."""


class Stranger(Part):
    """A process on the GPU that is not the fleet's."""

    pid: int
    """Process id."""
    name: str | None
    """Name of its program. Null where it is unknown."""
    memory_bytes: int | None
    """Memory of the GPU that it holds, in bytes. Null where the driver does not tell."""
    active: bool | None
    """True if it was seen at work. Null where the driver does not tell."""


class EarlierAttempt(Part):
    """An attempt before the one that gave the verdict."""

    number: int
    """Number of the attempt, from 1."""
    worker: str
    """Name of the worker."""
    device: str
    """Its device: a GPU's UUID, or ``cpu``."""
    category: Category
    """How the attempt ended."""
    message: str
    """What happened, in one line."""
    seconds: float
    """How long it took, in seconds."""
    handed_back: bool = Field(default=False, exclude_if=lambda value: not value)
    """True if its worker was told to stop. Such an attempt uses up no try."""


# Facts and evidence ------------------------------------------------------------------------------------


class Hack(StrEnum):
    """The kinds of cheating that end an evaluation as ``reward_hack``."""

    FASTER_THAN_MEMORY = "faster_than_memory"
    """The outputs cannot have been written in the measured time."""
    DECOY = "decoy"
    """The source's own GPU code does practically none of the work."""


class Facts(Part):
    """The facts from which a category was decided. Each category has those that :data:`NEEDS` names for it."""

    exception: str | None = _ABSENT
    """Qualified name of the exception's type."""
    cuda_code: int | None = _ABSENT
    """CUDA's error code."""
    traceback: str | None = _ABSENT
    """The end of the traceback of an exception that the reference raised."""
    reason: str | None = _ABSENT
    """Why the candidate's process ended: ``deadline``, ``memory``, ``output``, ``scratch``, ``closed`` (it closed its
    channel), ``exited`` (by itself) or ``killed`` (by an operator, or by Linux where the host ran out of memory)."""
    status: int | None = _ABSENT
    """Wait status of the candidate's process, as ``waitpid`` gives it."""
    signal: str | None = _ABSENT
    """Name of the signal that ended the process, such as ``SIGSEGV``."""
    exit_status: int | None = _ABSENT
    """Exit status of a process that ended by itself."""
    leftovers: int | None = _ABSENT
    """Number of processes that the candidate left behind."""
    peak_bytes: int | None = _ABSENT
    """Largest private memory of the candidate's process tree, in bytes."""
    held_bytes: int | None = _ABSENT
    """Memory of the GPU that the candidate held, in bytes."""
    allowed_bytes: int | None = _ABSENT
    """Memory of the GPU that may be held, in bytes."""
    needed_bytes: int | None = _ABSENT
    """Memory of the GPU that the problem needs, in bytes, where the GPU does not have so much."""
    line: int | None = _ABSENT
    """Line of a syntax error, from 1."""
    column: int | None = _ABSENT
    """Column of a syntax error, from 1."""
    text: str | None = _ABSENT
    """Source line of a syntax error."""
    shortage: Shortage | None = _ABSENT
    """What a launch lacked, where Triton says so."""
    findings: tuple[Finding, ...] | None = _ABSENT
    """The findings for which a policy rejected the source."""
    output: int | None = _ABSENT
    """Number of the wrong output, from 0."""
    input: int | None = _ABSENT
    """Number of the input that was changed or returned, from 0."""
    structure: str | None = _ABSENT
    """Structure of the kernel's output, with ``T`` for a tensor."""
    kind: str | None = _ABSENT
    """Kind of the inputs: ``given`` (the problem's own), ``scaled``, ``uniform``, ``integers`` or ``adversarial``."""
    wrong: int | None = _ABSENT
    """Number of wrong values in the output."""
    of: int | None = _ABSENT
    """Number of values in the output."""
    first: tuple[WrongPlace, ...] | None = _ABSENT
    """The first wrong values."""
    map: WrongMap | None = _ABSENT
    """Where all wrong values lie. None where only pieces of the output were compared, as of long timed calls."""
    max_abs_error: Figure | None = _ABSENT
    """As :attr:`ErrorFigures.max_abs_error`, of the input set that was wrong."""
    max_rel_error: Figure | None = _ABSENT
    """As :attr:`ErrorFigures.max_rel_error`, of the input set that was wrong."""
    relative_norm: Figure | None = _ABSENT
    """As :attr:`ErrorFigures.relative_norm`, of the input set that was wrong."""
    error_ratio: Figure | None = _ABSENT
    """As :attr:`ErrorFigures.error_ratio`, of the input set that was wrong."""
    precision_downgrade: bool | None = _ABSENT
    """As :attr:`ErrorFigures.precision_downgrade`, of the input set that was wrong."""
    strict_correct: bool | None = _ABSENT
    """As :attr:`ErrorFigures.strict_correct`, of the input set that was wrong."""
    kernelbench_correct: bool | None = _ABSENT
    """As :attr:`ErrorFigures.kernelbench_correct`, of the input set that was wrong."""
    failed: int | None = _ABSENT
    """Number of failures that pytest reported, of tests and their fixtures."""
    hack: Hack | None = _ABSENT
    """The kind of cheating: ``faster_than_memory`` or ``decoy``."""
    median_ms: float | None = _ABSENT
    """The median time that memory does not allow, in milliseconds."""
    bytes_in: int | None = _ABSENT
    """As :attr:`Floor.bytes_in`."""
    bytes_out: int | None = _ABSENT
    """As :attr:`Floor.bytes_out`."""
    bandwidth_gbs: float | None = _ABSENT
    """As :attr:`Floor.bandwidth_gbs`."""
    floor_ms: float | None = _ABSENT
    """As :attr:`Floor.floor_ms`."""
    floor_out_ms: float | None = _ABSENT
    """As :attr:`Floor.floor_out_ms`."""
    bytes_needed: int | None = _ABSENT
    """As :attr:`Floor.bytes_needed`."""
    floor_needed_ms: float | None = _ABSENT
    """As :attr:`Floor.floor_needed_ms`."""
    own_share: float | None = _ABSENT
    """As :attr:`Provenance.own_share`, of a decoy."""
    library: tuple[LibraryKernel, ...] | None = _ABSENT
    """As :attr:`Provenance.library`, of a decoy."""
    clocks: Clocks | None = _ABSENT
    """Clocks of a GPU that was throttled throughout."""
    strangers: tuple[Stranger, ...] | None = _ABSENT
    """Processes of others that kept the kernel from being timed."""
    missing: tuple[str, ...] | None = _ABSENT
    """What this worker lacks to judge the backend, each with what to do."""
    room_bytes: int | None = _ABSENT
    """Free space on the worker's disk, in bytes, when that was too little."""
    instead_of: Category | None = _ABSENT
    """The category that does not count, because the fleet failed as well."""
    out_of_memory: bool | None = _ABSENT
    """True if the host's kernel killed processes for want of memory meanwhile."""
    hard_limit: bool | None = _ABSENT
    """True if the judge overran Celery's hard limit."""
    lease_expired: bool | None = _ABSENT
    """True if the worker was silent for longer than its lease."""
    suspected: bool | None = _ABSENT
    """True if several attempts took their worker or GPU with them."""


class Evidence(Part):
    """What an attempt observed, beside its category. A field is None where nothing was looked at."""

    findings: tuple[Finding, ...] | None = _ABSENT
    """Labels that static rules gave to the source, the most severe first. None where the policy is ``allow``."""
    build: Build | None = _ABSENT
    """Compilation of a ``cuda`` or ``cpp`` source by the builder."""
    inputs: tuple[InputTensor, ...] | None = _ABSENT
    """The tensors among the inputs of one call, in their order. None where the problem made none."""
    checks: int | None = _ABSENT
    """Number of the problem's input sets, hidden variants included, on which the kernel agreed with the reference."""
    checks_asked: int | None = _ABSENT
    """Number of those that the settings asked for. The others are hidden variants."""
    comparison: ErrorFigures | None = _ABSENT
    """Error of the outputs over all input sets that were compared, and both verdicts on it. A wrong kernel has both
    too. None where no output was compared."""
    tolerance: GivenTolerance | None = _ABSENT
    """The tolerance that the settings or the problem gave. None where the dtype's counts."""
    tf32: bool | None = _ABSENT
    """True if products and convolutions of fp32 values could use TF32. None on a CPU."""
    reference_is_constant: bool | None = _ABSENT
    """True if the reference gives the same answer to all inputs."""
    verified_calls: int | None = _ABSENT
    """Number of timed calls whose outputs were compared afterwards. None where the kernel was not timed."""
    floor: Floor | None = _ABSENT
    """Time that the GPU's memory needs for inputs and outputs. None on a CPU."""
    provenance: Provenance | None = _ABSENT
    """The origin of the code that did the work on the GPU."""
    provenance_error: str | None = _ABSENT
    """The reason why the provenance is unknown, where it was asked for."""
    sanitized: tuple[Sanitized, ...] | None = _ABSENT
    """What compute-sanitizer says, a run for each tool. None where it was not asked for."""
    profile: Profile | None = _ABSENT
    """What the kernels of a call do. None where it was not asked for."""
    tests: Tests | None = _ABSENT
    """What pytest reported, where tests of a repository stand in the place of a kernel."""
    compiled_baseline: Measurement | BaselineError | None = _ABSENT
    """Time of the reference under ``torch.compile``, or why there is none. None where it was not asked for."""
    baseline_drift: Drift | None = _ABSENT
    """Change of the device since the cached baseline was taken, where it was large."""
    canary: str | None = _ABSENT
    """Result of the GPU's own test after the candidate, in words."""
    leaked_bytes: int | None = _ABSENT
    """Memory of the GPU that no process owned after the candidate, in bytes. None where that is unknown."""
    strangers: tuple[Stranger, ...] | Literal["unknown"] | None = _ABSENT
    """Processes of others on the GPU while the kernel was timed. ``unknown`` where they cannot be told apart."""
    reference: ReferenceProcess | None = _ABSENT
    """The process that ran the reference."""
    gpu_memory: GpuMemory | None = _ABSENT
    """The plan of the GPU's memory. None on a CPU."""
    isolation: Isolation | None = _ABSENT
    """The seal around the candidate. None where no candidate was started."""
    slots_on_device: int | None = _ABSENT
    """Number of slots that share the device."""
    waited_for: tuple[str, ...] | None = _ABSENT
    """Processes of other fleets and local judges of the same user that had the device while the evaluation waited for
    it (``durations_s.wait_for_device``). None where there was none."""
    durations_s: dict[str, float] | None = _ABSENT
    """Time of each step, in seconds, by the step's name. Steps may contain other steps."""
    begun_s: dict[str, float] | None = _ABSENT
    """When each step first began, in seconds after the judge took the evaluation up, by the step's name."""
    cpu_s: dict[str, float] | None = _ABSENT
    """CPU time of the processes of the evaluation, all their threads and children included, in seconds: of the
    ``judge``, ``reference``, ``candidate``, ``builder``, ``compiled`` (the reference under ``torch.compile``) and
    ``examined``. Of a reference that was kept, what it used in this evaluation."""
    peak_bytes: int | None = _ABSENT
    """Largest private memory of the candidate's process tree, in bytes."""
    output_bytes: int | None = _ABSENT
    """Size of all that the candidate wrote to stdout and stderr, in bytes."""
    cleanup: str | None = _ABSENT
    """The reason why the end of the candidate's process is unknown."""
    alone: bool | None = _ABSENT
    """True if the evaluation had its device alone, because earlier attempts took their worker or GPU with them."""
    attempts: tuple[EarlierAttempt, ...] | None = _ABSENT
    """The attempts before this one. None where there was none."""
    traceback: str | None = _ABSENT
    """The end of the judge's own traceback, where the judge failed."""
    emptied_at: datetime | None = _ABSENT
    """When retention emptied the log and the long entries of the evidence."""

    @field_validator("floor", "isolation", mode="before")
    @classmethod
    def _empty_is_none(cls, value: object) -> object:
        """A judge says by an empty object that a CPU has no floor, and that no candidate was sealed."""
        return None if value == {} else value


# What each category tells ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Needs:
    """What an outcome of one category must have.

    Attributes:
        message: a line for people.
        phase: the phase in which it ended.
        facts: fields of :class:`Facts`, all of which it has.
        one_of: fields of :class:`Facts`, at least one of which it has.
    """

    message: bool = True
    phase: bool = False
    facts: tuple[str, ...] = ()
    one_of: tuple[str, ...] = ()

    def missing(self, *, message: str, phase: str | None, facts: Facts) -> list[str]:
        """Return the names of what an outcome lacks; empty for one that has all."""
        lacking = [f"facts.{name}" for name in self.facts if getattr(facts, name) is None]
        if self.one_of and all(getattr(facts, name) is None for name in self.one_of):
            lacking.append(" or ".join(f"facts.{name}" for name in self.one_of))
        if self.phase and phase is None:
            lacking.insert(0, "phase")
        if self.message and not message:
            lacking.insert(0, "message")
        return lacking


_RAISED: Final = ("exception",)
_ENDED: Final = ("reason",)
_COMPARED: Final = ("output", "kind", "wrong", "of", "first")
#: Facts beyond the message, and the phase for failures of candidates and problems.
_FACTS: Final[dict[Category, tuple[str, ...]]] = {
    Category.IMPORT_ERROR: _RAISED,
    Category.REJECTED_BY_POLICY: ("findings",),
    Category.COMPILE_ERROR: _RAISED,
    Category.COMPILE_TIMEOUT: _ENDED,
    Category.INIT_ERROR: _RAISED,
    Category.RUNTIME_ERROR: _RAISED,
    Category.ILLEGAL_MEMORY_ACCESS: (*_RAISED, "cuda_code"),
    Category.CUDA_ERROR: _RAISED,
    Category.LAUNCH_RESOURCES_EXCEEDED: _RAISED,
    Category.TIMEOUT: _ENDED,
    Category.OUTPUT_LIMIT: _ENDED,
    Category.WRONG_SHAPE: ("output",),
    Category.WRONG_DTYPE: ("output",),
    Category.WRONG_DEVICE: ("output",),
    Category.NOT_FINITE: _COMPARED,
    Category.WRONG_VALUES: _COMPARED,
    Category.NONDETERMINISTIC: _COMPARED,
    Category.INPUT_MUTATED: ("input",),
    Category.REWARD_HACK: ("hack",),
    Category.TESTS_FAILED: ("failed",),
}
_ONE_OF: Final[dict[Category, tuple[str, ...]]] = {
    Category.GPU_OUT_OF_MEMORY: ("exception", "held_bytes"),
    Category.HOST_OUT_OF_MEMORY: ("exception", "reason"),
    Category.CRASHED: ("signal", "exit_status", "exception"),
    Category.WRONG_OUTPUT_STRUCTURE: ("structure", "output"),
    Category.TIMING_UNSTABLE: ("clocks", "strangers"),
}
#: What an outcome of each category must have. :class:`kqueue.contract.Outcome` refuses one that lacks it.
NEEDS: Final[dict[Category, Needs]] = {
    category: Needs(
        message=info.blame is not Blame.NONE,
        phase=info.blame in {Blame.CANDIDATE, Blame.PROBLEM} or category is Category.TIMING_UNSTABLE,
        facts=_FACTS.get(category, ()),
        one_of=_ONE_OF.get(category, ()),
    )
    for category, info in CATEGORIES.items()
}
