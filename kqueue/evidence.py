"""The typed parts of an outcome: measurements, facts and evidence, and the fields that each category needs.

A judge builds these models, so an unknown field or a wrong type is an error there. Rows of the database can come
from another version of kqueue: :meth:`kqueue.contract.Verdict.load` reads them and ignores unknown fields.

Names end in their units: ``_s`` seconds, ``_ms`` milliseconds, ``_bytes`` bytes, ``_gbs`` 10^9 bytes per second. In the
JSON form of :class:`Facts` and :class:`Evidence` a field without a value is absent. In the other models it is null.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer

from kqueue.categories import CATEGORIES, Blame, Category
from kqueue.states import Purpose
from kqueue.text import InNotebooks


class Part(BaseModel):
    """The base of all models of an outcome: immutable, without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with changed fields. Unlike pydantic's method, validate the changes."""
        copy = super().model_copy(deep=deep)
        return type(self).model_validate(dict(copy) | dict(update)) if update else copy


def json_number(value: float) -> float | str:
    """Return ``value`` in a form that JSON can hold: ``NaN``, ``Infinity`` and ``-Infinity`` become text."""
    if math.isfinite(value):
        return float(value)
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


#: Type of a number that a candidate influences, so it can be NaN or infinite.
Figure = Annotated[float, PlainSerializer(json_number, return_type=float | str, when_used="json")]


#: Default of a field that is absent from the JSON form if it has no value.
_ABSENT: Any = Field(default=None, exclude_if=lambda value: value is None)


# Time --------------------------------------------------------------------------------------------------


class Clocks(Part):
    """The clocks of a GPU after the timed calls. Empty on a CPU."""

    sm_mhz: float | None = _ABSENT
    """Clock of the streaming multiprocessors in MHz."""
    memory_mhz: float | None = _ABSENT
    """Clock of the memory in MHz."""
    throttle_reasons: str | None = _ABSENT
    """NVML's bit mask of all observed reasons for lower clocks, in hexadecimal."""


class Histogram(Part):
    """The distribution of the timed calls over bins of equal width."""

    low_ms: float
    """Lower end of the first bin: the shortest call."""
    high_ms: float
    """Upper end of the last bin, which also counts all longer calls."""
    counts: tuple[int, ...]
    """Number of calls in each bin."""


class Measurement(Part):
    """The time of one call. All times are in milliseconds, with the launch overhead subtracted.

    For a problem of several shapes it is the weighted geometric mean of their times, without a histogram and samples.
    """

    basis: Literal["gpu_clock", "cpu_clock"]
    """``gpu_clock``: CUDA events of the judge around work that was enqueued before the call. ``cpu_clock``: the judge's
    CPU clock from the start of a call to its answer, launch and wait included. It times the ``cpu`` lane, and a
    ``forward`` that waits for the GPU."""
    purpose: Purpose | None = None
    """Purpose of the time, which decided its precision. None in measurements of older versions."""
    count: Annotated[int, Field(ge=1)]
    """Number of timed calls that count."""
    discarded: Annotated[int, Field(ge=0)] = 0
    """Number of timed calls that do not count because the device was throttled."""
    precision: float | None = None
    """Half the width of the median's 95 % confidence interval, relative to the median."""
    low_ms: float | None = None
    """Lower end of the median's 95 % interval. It includes the launch overhead's error, and the clock's own error
    between two processes that run the same code. None in measurements of older versions."""
    high_ms: float | None = None
    """Upper end of that interval."""
    yardstick_ms: float | None = None
    """Median time of the judge's own work inside a call. It shows whether two measurements come from the same device in
    the same condition."""
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
    overhead_ms: float
    """Launch overhead: median time of the same round trip without a ``forward``. All times above exclude it."""
    is_fine: bool = False
    """True if the times are from the clock of the process that ran the kernel, on a GPU from CUDA events. They count
    only where the judge's clock confirms them within its error, because the kernel could change them."""
    cold_l2: bool
    """True if the GPU's L2 cache was flushed before each call."""
    clocks: Clocks = Clocks()
    """Clocks of the GPU, as far as the driver reports them."""
    histogram: Histogram | None = None
    """Distribution of the calls. Outliers count in the last bin. Null in measurements of older versions."""
    samples_ms: tuple[float, ...] | None = None
    """Time of each call that counts, to the nanosecond. Null in older measurements, and for several shapes together."""
    between_ms: float | None = None
    """CPU time that the kernel's process used between two calls, if it is more than a tenth of a call. All times above
    include it. Only on a CPU."""

    @property
    def error(self) -> float | None:
        """Half the width of the median's interval, relative to the median. None if it is unknown."""
        if self.low_ms is None or self.high_ms is None or self.median_ms <= 0:
            return None
        return self.high_ms / self.median_ms - 1  # low_ms is never below zero


def speedup_interval(speedup: float, error: float | None, other: float | None) -> tuple[float, float] | None:
    """Return the 95 % interval of a speedup, from the relative errors of both times. None if one is unknown."""
    if error is None or other is None:
        return None
    factor = 1 + math.hypot(error, other)
    return speedup / factor, speedup * factor


class TimedVariants(Part):
    """Timed calls on hidden variants, at random positions among the calls on the problem's own inputs."""

    count: int
    """Number of calls."""
    ratio: float | None
    """Median time on variants divided by the time on the problem's own inputs. A large ratio shows a kernel that is
    fast on usual inputs only. None where the time is too short for a ratio."""
    slower: bool | None = _ABSENT
    """True if each call on a variant took longer than nine of ten on the problem's own inputs, of at least three."""


class PassResult(Part):
    """The time of one pass of an evaluation with gradients."""

    name: str
    """``forward`` (in grad mode), ``backward`` (both minus forward), or ``both``. The name of a shape precedes it where
    the problem names several."""
    runtime_ms: float | None
    """Median time of the kernel. Null if the noise of a difference exceeds it."""
    baseline_ms: float | None
    """Median time of the eager reference. Null in the same case."""
    speedup: float | None = None
    """``baseline_ms / runtime_ms``. Null unless one clock took all times and both are known."""
    speedup_interval: tuple[float, float] | None = None
    """The 95 % interval of the speedup, from the errors of the times."""


class ShapeResult(Part):
    """The result of one of a problem's shapes."""

    name: str
    """Name of the shape: ``held out`` and a number if only its result is shown."""
    held_out: bool
    """True if its sizes are not shown."""
    weight: float
    """Weight of its speedup in the geometric mean."""
    category: Category | None = None
    """Category of its checks and timing. Null if another shape failed before it."""
    runtime_ms: float | None = None
    """Median time of the kernel."""
    baseline_ms: float | None = None
    """Median time of the eager reference."""
    speedup: float | None = None
    """``baseline_ms / runtime_ms``. Null unless one clock took both times."""
    speedup_interval: tuple[float, float] | None = None
    """The 95 % interval of the speedup."""
    timing_basis: str | None = None
    """The clock that took the time (:attr:`Measurement.basis`)."""
    checks: int | None = None
    """Number of input sets, hidden variants included, on which the kernel agreed with the reference."""
    hidden_variants: int | None = None
    """Number of these that are hidden variants."""
    seconds: float | None = None
    """Time in seconds that the shape took."""
    runtime_samples_ms: tuple[float, ...] | None = None
    """:attr:`Measurement.samples_ms` of the kernel."""
    baseline_samples_ms: tuple[float, ...] | None = None
    """:attr:`Measurement.samples_ms` of the eager reference."""


class ShapeResults(Part):
    """The results of a problem's shapes. The verdict's speedup is their weighted geometric mean."""

    rows: tuple[ShapeResult, ...]
    """One for each shape, in the order in which they are judged: those that are held out come last."""
    worst: str | None = None
    """Name of the shape with the smallest speedup. Null unless all shapes passed and one has a speedup."""
    worst_speedup: float | None = None
    """That speedup."""
    spread: float | None = None
    """Largest speedup of a shape divided by the smallest."""


class BaselineError(Part):
    """A baseline that could not be measured."""

    error: str
    """The reason, in one line."""


class Drift(Part):
    """The change of the device since the cached baseline was measured, according to the judge's own work in a call."""

    was_ms: float
    """Median time of that work in milliseconds when the baseline was measured."""
    is_ms: float
    """Median time of that work in milliseconds during this kernel's timing."""


class SpeedOfLightBound(Part):
    """The speed-of-light bound: the time that the GPU's memory needs for the kernel's inputs and outputs."""

    bytes_in: int
    """Size in bytes of all inputs."""
    bytes_out: int
    """Size in bytes of all outputs that a kernel must write."""
    bandwidth_gbs: float
    """Peak bandwidth of the memory in 10^9 bytes per second."""
    floor_ms: float
    """Time to read the inputs once and write the outputs once. A kernel that needs only a part of its inputs can be
    faster."""
    floor_out_ms: float
    """Time to write the outputs once. No kernel is faster."""
    bytes_needed: int | None = _ABSENT
    """Lower bound of the input bytes on which the answer depends, according to tests of the input sensitivity, without
    the bytes that a cache can hold. Absent where the kernel was slow enough to read all inputs."""
    floor_needed_ms: float | None = _ABSENT
    """Time to read these bytes and write the outputs."""


# Values ------------------------------------------------------------------------------------------------


class ErrorFigures(Part):
    """The errors of a kernel's outputs: the maximum over all outputs and input sets."""

    max_abs_error: Figure
    """Largest absolute error of a value."""
    max_rel_error: Figure
    """Largest relative error of a value."""
    relative_norm: Figure
    """``|output - reference| / |reference|`` in the Euclidean norm."""
    error_ratio: Figure | None
    """Distance of the output from the float64 reference, divided by the distance of the reference itself. Without a
    float64 reference: distance from the reference, divided by the change that rounding errors of the inputs cause.
    Null where neither is known."""
    precision_downgrade: bool
    """True if the error is typical of a lower precision than the reference's."""
    strict_correct: bool
    """Result of the ``strict`` comparison: true if all outputs and input sets are correct."""
    kernelbench_correct: bool | None
    """Result of KernelBench's ``torch.allclose`` on the problem's own inputs. Null for other inputs."""
    jumps: int | None = _ABSENT
    """Number of gradients and integers that the strict comparison excuses, because the reference's own jump there."""


class ProfileResult(Part):
    """The result of another project's protocol (``settings.profiles``) on the problem's own inputs."""

    name: str
    """Name of the profile."""
    passed: bool | None
    """True if the kernel passes it. Null where that is unknown."""
    why: str = ""
    """The reason, unless it passes."""

    @property
    def words(self) -> str:
        """The result as text."""
        return "passed" if self.passed else f"{'unknown' if self.passed is None else 'failed'}: {self.why}"


class GivenTolerance(Part):
    """A tolerance that replaces the dtype's: ``|out - ref| <= atol + rtol * |ref|`` for every value."""

    atol: float
    """Absolute part."""
    rtol: float
    """Relative part."""
    matched_ratio: float | None = _ABSENT
    """Smallest share of values that must be within, if it is less than 1."""
    by: Literal["settings", "problem"]
    """Origin of the tolerance: the evaluation's settings, or the problem."""


class Checker(Part):
    """The ``check()`` that comes with a problem and decided whether outputs were right."""

    bound: float
    """Relative change of right outputs that it refused, which the problem states (``CHECK_BOUND``)."""
    accepts: tuple[str, ...] = ()
    """Outputs in another order that it accepts, in words."""


class WrongLocation(Part):
    """One wrong value of an output."""

    index: tuple[int, ...]
    """Its index in the output tensor. An additional last index distinguishes real and imaginary part."""
    expected: Figure
    """The reference's value."""
    got: Figure
    """The kernel's value."""


class WrongMap(Part):
    """A coarse map of the wrong values in an output. All dimensions except the last form the rows."""

    rows: int
    """Number of rows: the product of all dimensions except the last."""
    columns: int
    """Number of values in a row. The real and imaginary parts of a complex value are two."""
    shares: Annotated[tuple[Annotated[str, Field(pattern=r"^[0-9]{1,16}$")], ...], Field(min_length=1, max_length=16)]
    """The output in at most 16 by 16 cells, one text for each row of cells with one digit for each cell: ``0`` where no
    value is wrong, ``9`` where all are, ``1`` to ``8`` for the eighths between. With ``n`` cells, cell ``i`` (from 0)
    begins at ``i * rows // n`` or ``i * columns // n``."""


class Shortage(Part):
    """A launch that requested more of a GPU's resource than available, reported by Triton."""

    resource: str
    """The exceeded resource: ``shared memory`` in bytes, ``threads`` of a block, ``tensor memory`` in columns."""
    required: int
    """Requested amount."""
    limit: int
    """Available amount."""
    kernel: str
    """Name of the kernel. Empty if unknown."""
    settings: str
    """The kernel's constants and options to change, such as ``BLOCK=128, num_stages=4``."""


# The source and who did the work -----------------------------------------------------------------------


class Severity(StrEnum):
    """The severity of a finding."""

    CHEAT = "cheat"
    """The code has no other use in a kernel."""
    SUSPICIOUS = "suspicious"
    """The code has honest uses too."""
    NOTE = "note"
    """The code is usual."""


#: Rule of a finding about a kernel that is right on the problem's own sizes only.
SIZES_RULE: Final = "shape_specialised"


class Finding(Part):
    """A match of a static rule in the source. It is not a proof."""

    rule: str
    """Name of the rule."""
    severity: Severity
    """``cheat``, ``suspicious`` or ``note``."""
    line: int | None
    """Line of the source, from 1. Null where the rule names none."""
    evidence: str
    """The text that the rule matched, shortened, without control characters."""
    by: Literal["kqueue", "kernelguard"]
    """The project that defines the rule."""
    meaning: str
    """The rule's target in one line."""


class LibraryKernel(Part):
    """A library's GPU kernel that ran in the call."""

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
    """Share of kernels whose names are neither in the source nor known from a library."""
    unclear: tuple[str, ...]
    """Names of these kernels."""
    copies_share: float
    """Share of copies and fills."""
    decoy: bool
    """True if the source's own kernels did almost none of the work."""
    why: str
    """The result in one line."""
    basis: str
    """The source of these figures: the candidate's own profile, which a kernel could forge."""


class EvidentTree(Part):
    """The files of a repository or folder from which a kernel or problem imports."""

    of: Literal["kernel", "problem"]
    """The source that names it."""
    hash: str
    """SHA-256 of its text, which lists its files with their hashes."""
    files: int
    """Number of its files."""
    named: tuple[str, ...]
    """SHA-256 and path of its first files, by path, up to 16 KiB."""


class Build(Part):
    """The compilation of the extensions that the source builds when it is imported."""

    where: Literal["builder", "candidate", "store"]
    """The process that compiled: the sealed builder or the candidate itself. ``store`` if nothing was compiled, because
    the result of an earlier evaluation of the same source was stored, success or failure."""
    libraries: int
    """Number of libraries that the builder compiled."""
    seconds: float
    """Time in seconds that the builder took, or that fetching the stored libraries took."""
    peak_bytes: int
    """Maximum private memory in bytes of the builder's process tree."""
    skipped: str | None = _ABSENT
    """The reason why the builder gave up and the candidate compiled."""
    earlier_seconds: float | None = _ABSENT
    """Time in seconds of the builder whose stored libraries were used."""
    key: str | None = _ABSENT
    """Hash of everything that the build depends on. It is the key in the store. Absent where builds are not stored."""


# Examinations ------------------------------------------------------------------------------------------
# A tool shares a sealed process with the kernel, so its report is a claim, like a candidate's own profile.


class SanitizerFinding(Part):
    """An error that compute-sanitizer found at one location of the code, for all threads together."""

    kind: str
    """The error, such as ``Invalid __global__ read of size 16 bytes``."""
    kernel: str | None = None
    """Name of the kernel. Null where the tool names none."""
    file: str | None = None
    """Name of the source file. Null where the kernel was compiled without line information."""
    line: int | None = None
    """Line in that file, from 1."""
    block: tuple[int, int, int] | None = None
    """Block of the first thread with the error."""
    thread: tuple[int, int, int] | None = None
    """Index of that thread in its block."""
    address: str | None = None
    """Address that the thread accessed, in hexadecimal."""
    size_bytes: int | None = None
    """Size of the access."""
    allocation_bytes: int | None = None
    """Size of the nearest allocation."""
    distance_bytes: int | None = None
    """Distance from that allocation: behind its end or, if negative, before its beginning. 0 if the access begins
    inside."""
    detail: str = ""
    """Further text of the tool on the first error."""
    count: int
    """Number of reports of this error."""


class Sanitized(Part):
    """One run under a tool of compute-sanitizer."""

    tool: str
    """Name of the tool."""
    errors: int | None = None
    """Number of errors according to the tool, which counts each thread. Null where it did not finish."""
    findings: tuple[SanitizerFinding, ...] = ()
    """At most 32 findings, in the order of their first occurrence."""
    error: str | None = None
    """The reason why the run is incomplete or has no result."""
    seconds: float
    """Time of the run in seconds."""


class Stall(Part):
    """A reason for which warps waited."""

    reason: str
    """The reason, by Nsight Compute's name, such as ``long_scoreboard`` (waiting for global memory)."""
    share: float
    """Its share of all waiting, 0 to 1."""


class SourceLine(Part):
    """A source line at which warps were sampled."""

    file: str
    """Name of the file, such as ``kernel.py``."""
    line: int
    """Number of the line, from 1."""
    share: float
    """Share of the kernel's warp samples that were at this line, 0 to 1."""
    text: str | None = None
    """Text of the line, where the file is known."""


class KernelProfile(Part):
    """The profile of one kernel of a call, for all its launches in that call together. Shares are 0 to 1."""

    name: str
    """Name of the kernel."""
    launches: int
    """Number of launches."""
    duration_ms: float
    """Time on the GPU in milliseconds, without concurrent work and with cold caches."""
    grid: tuple[int, int, int] | None = None
    """Blocks of the longest launch. The fields below are of that launch too."""
    block: tuple[int, int, int] | None = None
    """Threads of a block."""
    registers: int | None = None
    """Registers of a thread."""
    shared_bytes: int | None = None
    """Shared memory in bytes of a block."""
    spills: int | None = None
    """Number of instructions that move registers to memory or back."""
    occupancy: float | None = None
    """Active warps as a share of the maximum."""
    occupancy_limit: str | None = None
    """Resource that limits the number of blocks: ``registers``, ``shared memory``, ``warps`` or ``blocks``."""
    dram_bytes: float | None = None
    """Bytes read from and written to the GPU's memory."""
    dram_gbs: float | None = None
    """Achieved bandwidth in 10^9 bytes per second."""
    dram_share: float | None = None
    """Achieved bandwidth as a share of the memory's peak."""
    compute_share: float | None = None
    """Utilization of the processors' busiest unit."""
    tensor_share: float | None = None
    """Utilization of the tensor cores."""
    gflops: float | None = None
    """Operations in fp32 and fp64 outside the tensor cores, in 10^9 per second. A multiplication with an addition
    counts as two."""
    l2_hits: float | None = None
    """Hit rate of the L2 cache."""
    stalls: tuple[Stall, ...] = ()
    """The three most frequent reasons for which warps waited."""
    lines: tuple[SourceLine, ...] = ()
    """The five lines with the most warp samples. Only the three longest kernels have them, and only if their compiler
    recorded line information, as Triton and nvcc do here."""


class Profile(Part, InNotebooks):
    """The profiles of the kernels of one call."""

    by: Literal["ncu", "cupti"]
    """``ncu`` for Nsight Compute's counters. ``cupti`` where the counters are not readable: names, launches and times
    only."""
    kernels: tuple[KernelProfile, ...] = ()
    """At most 32 kernels, the longest first."""
    peak_gbs: float | None = None
    """Peak bandwidth of the GPU's memory at the clock of this run, in 10^9 bytes per second."""
    peak_gflops: float | None = None
    """Peak of the processors in fp32 without tensor cores, at the clock of this run, in 10^9 operations per second."""
    error: str | None = None
    """The reason why the profile is incomplete or empty."""
    seconds: float
    """Time of the run in seconds."""


# Tests -------------------------------------------------------------------------------------------------


class Tests(Part):
    """Pytest's output in the sealed process of a repository's tests. It is a claim of that process."""

    words: str
    """Pytest's reports and other messages, one JSON object per line, in the format of `workers/testing/child.py`."""
    findings: str | None = _ABSENT
    """Beginning of compute-sanitizer's output. None if it was not requested."""


# The device and its environment ------------------------------------------------------------------------


#: Type of a sandbox measure: True where it holds, otherwise the reason why it does not.
Measure = Literal[True] | str


class Isolation(Part):
    """The sandbox of the candidate. Each measure is true, or gives the reason why it does not hold."""

    level: Literal["none", "basic", "strong", "full"]
    """The level that follows from the measures."""
    view: Literal["host", "rebuilt"]
    """``rebuilt`` if candidates see a private view of the file system, otherwise ``host``."""
    torch: str | None = None
    """Version of torch in the candidate's process."""
    own_uid: Measure
    """The candidate has a separate user id."""
    no_capabilities: Measure
    """It has no capabilities."""
    no_new_privs: Measure
    """It cannot gain privileges by executing a file."""
    limits: Measure
    """Resource limits apply to it."""
    seccomp: Measure
    """A seccomp filter restricts its system calls."""
    files: Measure
    """Landlock restricts the files that it can read and write."""
    mounts: Measure
    """Its files, also in ``/tmp``, ``/var/tmp`` and ``/dev/shm``, are in a private file system of a fixed size."""
    tcp: Measure
    """Landlock denies TCP."""
    devices: Measure
    """Landlock restricts the devices that it can control."""
    scopes: Measure
    """Landlock denies it signals and abstract sockets of other processes."""
    gpu_nodes: Measure
    """It sees only the device nodes of its GPU."""
    user_namespace: Measure
    """It has a separate user namespace, where the fleet is not root."""
    network_namespace: Measure
    """It has a separate network namespace."""
    ipc_namespace: Measure
    """It has a separate IPC namespace."""
    cgroup_memory: Measure
    """A control group limits its memory."""
    cgroup_processes: Measure
    """A control group limits its processes."""
    cgroup_kill: Measure
    """A control group can kill all of its processes at once."""


class InputTensor(Part):
    """A tensor among the inputs of one call."""

    shape: tuple[int, ...]
    """Its shape."""
    dtype: str
    """Its dtype in the evaluation's precision, such as ``float32``."""


class ReferenceProcess(Part):
    """The process that ran the reference."""

    kept: bool
    """True if it had already served an earlier evaluation of the problem."""
    uses: int
    """Number of evaluations that it has served, including this one."""
    replaced: str | None = _ABSENT
    """The reason why an existing process was replaced."""


class GpuMemory(Part):
    """The plan of GPU memory for the processes of the evaluation, in bytes, without their CUDA contexts."""

    inputs_bytes: int
    """Size of the inputs of one call."""
    outputs_bytes: int | None = None
    """Size of the outputs of one call. Null where the reference has not answered."""
    weights_bytes: int
    """Size of the reference's weights."""
    judge_bytes: int
    """Limit of the judge."""
    reference_bytes: int
    """Limit of the reference."""
    candidate_bytes: int
    """Memory guaranteed to the kernel, weights and outputs included."""
    used_bytes: int | None = None
    """Maximum observed sum of the evaluation's processes, contexts included. Null if not observed: for small problems,
    and on hosts whose driver does not report it."""


class Environment(Part):
    """The device and software on which an attempt ran."""

    device: str
    """Name of the GPU or CPU."""
    driver: str | None = None
    """Version of the GPU's driver."""
    memory_bytes: int | None = None
    """Size in bytes of the GPU's memory."""
    cuda: str | None = None
    """Version of CUDA for which torch was built. Null on a CPU."""
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
    """Version of kqueue that judged. Null where it did not report its version."""


class ForeignGpuProcess(Part):
    """A GPU process that does not belong to the fleet."""

    pid: int
    """Its process id."""
    name: str | None
    """Name of its program. Null if unknown."""
    memory_bytes: int | None
    """GPU memory in bytes that it holds. Null where the driver does not report it."""
    active: bool | None
    """True if it was observed computing. Null where the driver does not report it."""


class EarlierAttempt(Part):
    """An attempt before the one that gave the verdict."""

    number: int
    """Number of the attempt, from 1."""
    worker: str
    """Name of the worker."""
    device: str
    """Its device: a GPU's UUID, or ``cpu``."""
    category: Category
    """Outcome of the attempt."""
    message: str
    """Explanation in one line."""
    seconds: float
    """Duration in seconds."""
    handed_back: bool = Field(default=False, exclude_if=lambda value: not value)
    """True if its worker was asked to stop. Such an attempt does not count."""


# Facts and evidence ------------------------------------------------------------------------------------


class Hack(StrEnum):
    """The kinds of cheating that end an evaluation as ``reward_hack``."""

    FASTER_THAN_MEMORY = "faster_than_memory"
    """The measured time is too short for writing the outputs."""
    DECOY = "decoy"
    """The source's own GPU code does almost none of the work."""


class Facts(Part):
    """The facts from which a category was decided. :data:`NEEDS` lists those that each category has."""

    exception: str | None = _ABSENT
    """Qualified name of the exception's type."""
    cuda_code: int | None = _ABSENT
    """CUDA's error code."""
    traceback: str | None = _ABSENT
    """End of the traceback of an exception that the reference raised."""
    reason: str | None = _ABSENT
    """Reason for the end of the candidate's process: ``deadline``, ``memory``, ``output``, ``scratch``, ``closed`` (it
    closed its channel), ``exited`` (by itself) or ``killed`` (by an operator, or by Linux on a host that ran out of
    memory)."""
    status: int | None = _ABSENT
    """Wait status of the candidate's process, as ``waitpid`` gives it."""
    signal: str | None = _ABSENT
    """Name of the signal that ended the process, such as ``SIGSEGV``."""
    exit_status: int | None = _ABSENT
    """Exit status of a process that ended by itself."""
    leftovers: int | None = _ABSENT
    """Number of processes that the candidate left behind."""
    peak_bytes: int | None = _ABSENT
    """Maximum private memory in bytes of the candidate's process tree."""
    held_bytes: int | None = _ABSENT
    """GPU memory in bytes that the candidate held."""
    allowed_bytes: int | None = _ABSENT
    """Limit in bytes of the candidate's GPU memory."""
    needed_bytes: int | None = _ABSENT
    """GPU memory in bytes that the problem needs, where it exceeds the GPU's."""
    line: int | None = _ABSENT
    """Line of a syntax error, from 1."""
    column: int | None = _ABSENT
    """Column of a syntax error, from 1."""
    text: str | None = _ABSENT
    """Source line of a syntax error."""
    shortage: Shortage | None = _ABSENT
    """The resource that a launch lacked, where Triton reports it."""
    findings: tuple[Finding, ...] | None = _ABSENT
    """The findings for which a policy rejected the source."""
    rank: int | None = _ABSENT
    """Number of the rank that failed first, from 0, of a problem with ``WORLD``."""
    output: int | None = _ABSENT
    """Number of the wrong output, from 0."""
    effect: str | None = _ABSENT
    """Name of the wrong output if ``forward`` does not return it, such as ``input 0 after the call`` or ``gradient of
    inputs[0]``."""
    input: int | None = _ABSENT
    """Number of the input that was changed or returned, from 0."""
    structure: str | None = _ABSENT
    """Structure of the kernel's output, with ``T`` for a tensor."""
    kind: str | None = _ABSENT
    """Kind of the inputs: ``given`` (the problem's own), or hidden, such as ``scaled`` or ``ends_2``."""
    wrong: int | None = _ABSENT
    """Number of wrong values in the output."""
    of: int | None = _ABSENT
    """Number of values in the output."""
    unwritten: int | None = _ABSENT
    """Number of wrong values that the kernel never wrote."""
    ties_only: bool | None = _ABSENT
    """True if the output's indices differ from the reference's only where the values at them are equal."""
    likeness: str | None = _ABSENT
    """Simple relation of the wrong output to the reference's, in words."""
    first: tuple[WrongLocation, ...] | None = _ABSENT
    """The first wrong values."""
    map: WrongMap | None = _ABSENT
    """Map of all wrong values. None if only parts of the output were compared, for example of long timed calls."""
    errors: ErrorFigures | None = _ABSENT
    """Errors of the wrong input set. :attr:`Evidence.comparison` counts all."""
    failed: int | None = _ABSENT
    """Number of failures that pytest reported, of tests and their fixtures."""
    hack: Hack | None = _ABSENT
    """The kind of cheating: ``faster_than_memory`` or ``decoy``."""
    median_ms: float | None = _ABSENT
    """Median time in milliseconds that is too short for the memory's bandwidth."""
    clocks: Clocks | None = _ABSENT
    """Clocks of a GPU that was throttled in all calls."""
    foreign_processes: tuple[ForeignGpuProcess, ...] | None = _ABSENT
    """Foreign GPU processes that prevented the timing."""
    missing: tuple[str, ...] | None = _ABSENT
    """Requirements of the backend that this worker lacks, each with the remedy."""
    room_bytes: int | None = _ABSENT
    """Free space in bytes on the worker's disk, if it was too little."""
    instead_of: Category | None = _ABSENT
    """The category that does not count, because the fleet failed as well or the kernel needs a GPU."""
    out_of_memory: bool | None = _ABSENT
    """True if Linux killed processes meanwhile because the host lacked memory."""
    hard_limit: bool | None = _ABSENT
    """True if the judge exceeded Celery's hard limit."""
    lease_expired: bool | None = _ABSENT
    """True if the worker was silent for longer than its lease."""
    shape: str | None = _ABSENT
    """Name of the shape that failed, where the problem names several."""
    withheld: bool | None = _ABSENT
    """True if that shape is held out. Then there are no other facts and no log, because they could show it."""
    suspected: bool | None = _ABSENT
    """True if several attempts lost their worker or GPU, so that the kernel is suspected."""


class Evidence(Part):
    """The observations of an attempt in addition to its category. A field without an observation is None."""

    findings: tuple[Finding, ...] | None = _ABSENT
    """Matches of static rules in the source, the most severe first. None where the policy is ``allow``."""
    program: str | None = _ABSENT
    """Hash of the kernel's source without comments, white space and names of variables. Leaderboards compare it."""
    trees: tuple[EvidentTree, ...] | None = _ABSENT
    """The trees that kernel and problem name. None where they name none."""
    build: Build | None = _ABSENT
    """Compilation of a ``cuda`` or ``cpp`` source by the builder."""
    inputs: tuple[InputTensor, ...] | None = _ABSENT
    """The tensors among the inputs of one call, in their order. None where the problem made none."""
    reference_draws: bool | None = _ABSENT
    """True if the reference of a kernel with wrong values draws random numbers in ``forward``."""
    training_modules: tuple[str, ...] | None = _ABSENT
    """Classes of that reference's modules that depend on the training mode and are in it, such as ``BatchNorm2d``."""
    parameters: str | None = _ABSENT
    """Differences of that kernel's parameters, which the kernel itself reports, from the reference's."""
    checks: int | None = _ABSENT
    """Number of the problem's input sets, hidden variants included, on which the kernel agreed with the reference."""
    checks_asked: int | None = _ABSENT
    """Number of these input sets that the settings requested. The remaining ones are hidden variants."""
    comparison: ErrorFigures | None = _ABSENT
    """Errors of the outputs over all compared input sets, and the results of both comparisons, for wrong kernels too.
    None where no output was compared."""
    profiles: tuple[ProfileResult, ...] | None = _ABSENT
    """Results of the profiles that the settings name. None where there are none."""
    tolerance: GivenTolerance | None = _ABSENT
    """Tolerance from the settings or the problem. None where the dtype's applies."""
    tolerances: tuple[GivenTolerance | None, ...] | None = _ABSENT
    """Tolerances of the outputs, if settings or problem give a list."""
    checker: Checker | None = _ABSENT
    """The problem's own check. None where the comparison decides."""
    calls: int | None = _ABSENT
    """Number of forwards in each call, without a reset between them. None for a single one."""
    tf32: bool | None = _ABSENT
    """True if products and convolutions of fp32 values could use TF32. None on a CPU."""
    reference_is_constant: bool | None = _ABSENT
    """True if some output of the reference is the same for all inputs, so that a constant is right there."""
    constant_outputs: tuple[int, ...] | None = _ABSENT
    """Numbers of these outputs. They depend on the weights alone, or consist of rounding errors."""
    verified_calls: int | None = _ABSENT
    """Number of timed calls whose outputs were compared afterwards. None where the kernel was not timed."""
    setup_ms: float | None = _ABSENT
    """Time in milliseconds of the kernel's ``setup()``, which runs once before the first call and is not part of the
    runtime. None if it declares none."""
    reference_setup_ms: float | None = _ABSENT
    """Time in milliseconds of the problem's ``Model.setup()``. None if it declares none."""
    shapes: ShapeResults | None = _ABSENT
    """Results of the problem's shapes. ``checks``, ``checks_asked``, ``verified_calls``, ``cpu_s`` and
    ``compiled_baseline`` are of all judged shapes, ``comparison`` and ``provenance`` of those that are not held out.
    The rest is of the shape that failed, or else of the first, and a kernel that passed has no ``floor``. None where
    the problem names no shapes."""
    gradients: tuple[str, ...] | None = _ABSENT
    """Names of the gradients that were compared, such as ``inputs[0]`` and ``weight linear.weight``: at most 16, chosen
    at random if there are more. None where no gradients were asked for."""
    passes: tuple[PassResult, ...] | None = _ABSENT
    """Times of forward, backward and both. The last one is the verdict's own. None where no gradients were asked for,
    or the kernel was not timed."""
    unvaried: str | None = _ABSENT
    """Reason why no hidden variant was compared. None if one was, or the kernel did not pass."""
    sizes: tuple[str, ...] | None = _ABSENT
    """Other sizes of the problem on which the kernel was right too. None unless ``policies.shapes`` asks for them."""
    untimed: str | None = _ABSENT
    """Reason why a kernel was not timed although the settings requested it."""
    timed_variants: TimedVariants | None = _ABSENT
    """Timed calls on hidden variants. None where there were none."""
    baseline_taken: Literal["in_turn", "without_kernel"] | None = _ABSENT
    """When the baseline was measured: in turn with the kernel's calls, or without the kernel, because there was no
    memory for both or the kernel slowed down the reference."""
    judge_speedup: float | None = _ABSENT
    """Speedup by the judge's clock, where the process's own clock gave the times. None for several shapes."""
    floor: SpeedOfLightBound | None = _ABSENT
    """Speed-of-light bound: the time that the GPU's memory needs for inputs and outputs. None on a CPU."""
    provenance: Provenance | None = _ABSENT
    """Origin of the code that did the work on the GPU."""
    provenance_error: str | None = _ABSENT
    """The reason why the provenance is unknown, where it was requested."""
    sanitized: tuple[Sanitized, ...] | None = _ABSENT
    """Results of compute-sanitizer, one run for each tool. None if not requested."""
    profile: Profile | None = _ABSENT
    """Profile of the kernels of a call. None if not requested."""
    tests: Tests | None = _ABSENT
    """Pytest's output, where a repository's tests replace the kernel."""
    compiled_baseline: Measurement | BaselineError | None = _ABSENT
    """Time of the reference under ``torch.compile``, or the reason why it is missing. None if not requested."""
    baseline_drift: Drift | None = _ABSENT
    """Change of the device since the cached baseline was measured, if it was large."""
    self_test: str | None = _ABSENT
    """Result of the GPU self-test after the candidate, as text."""
    leaked_bytes: int | None = _ABSENT
    """GPU memory in bytes that no process owned after the candidate. None if unknown."""
    foreign_processes: tuple[ForeignGpuProcess, ...] | Literal["unknown"] | None = _ABSENT
    """Foreign GPU processes while the kernel was timed. ``unknown`` where they cannot be distinguished."""
    reference: ReferenceProcess | None = _ABSENT
    """Process that ran the reference."""
    gpu_memory: GpuMemory | None = _ABSENT
    """Plan of the GPU's memory. None on a CPU."""
    isolation: Isolation | None = _ABSENT
    """Sandbox of the candidate. None where no candidate was started."""
    slots_on_device: int | None = _ABSENT
    """Number of slots that share the device."""
    waited_for: tuple[str, ...] | None = _ABSENT
    """Processes of other fleets and local judges of the same user that held the device while the evaluation waited for
    it (``durations_s.wait_for_device``). None if there were none."""
    durations_s: dict[str, float] | None = _ABSENT
    """Duration in seconds of each step, by the step's name. Steps can contain other steps."""
    begun_s: dict[str, float] | None = _ABSENT
    """Time of each step's first beginning, in seconds after the judge started the evaluation, by the step's name."""
    cpu_s: dict[str, float] | None = _ABSENT
    """CPU time in seconds of the evaluation's processes, with all their threads and children: of the ``judge``,
    ``reference``, ``candidate``, ``builder``, ``compiled`` (the reference under ``torch.compile``) and ``examined``.
    A reused reference process counts with its time in this evaluation only."""
    peak_bytes: int | None = _ABSENT
    """Maximum private memory in bytes of the candidate's process tree."""
    output_bytes: int | None = _ABSENT
    """Size in bytes of the candidate's output to stdout and stderr."""
    cleanup: str | None = _ABSENT
    """The reason why the end of the candidate's process is unknown."""
    alone: bool | None = _ABSENT
    """True if the evaluation had exclusive use of its device, because earlier attempts lost their worker or GPU."""
    attempts: tuple[EarlierAttempt, ...] | None = _ABSENT
    """The attempts before this one. None if there were none."""
    traceback: str | None = _ABSENT
    """End of the judge's own traceback, where the judge failed."""
    emptied_at: datetime | None = _ABSENT
    """Time at which retention removed the log and the long entries of the evidence."""

    @property
    def doubts(self) -> str:
        """Labels that weaken a pass, for the end of its message. Empty without such a label."""
        comparison, outputs = self.comparison, ", ".join(map(str, self.constant_outputs or ()))
        own, rules = self.checker, {one.rule for one in self.findings or ()}
        found = {
            f"none of the input sets is a hidden variant: {self.unvaried}": self.unvaried,
            f"the problem's own check() decided, which refuses changes of {own.bound:g}" if own else "": bool(own),
            f"it accepts {' and '.join(own.accepts)}" if own else "": own and own.accepts,
            f"output {outputs} of the reference is the same for all inputs, so a constant is right": bool(outputs),
            "its values have a lower precision than the reference's": comparison and comparison.precision_downgrade,
            "the strict comparison refuses it": comparison and not comparison.strict_correct,
            "it does not change its model as the reference does": "buffers_not_kept" in rules,
            "a part of the reference's model was too large to be compared": "buffers_not_compared" in rules,
            "constant initial values hide a part of the reference": "weights_hidden" in rules,
            "its own GPU code did almost none of the work": self.provenance and self.provenance.decoy,
            "it takes longer on hidden variants": self.timed_variants and self.timed_variants.slower,
            "it is wrong on other sizes": SIZES_RULE in rules,
            "its source has code for cheating": any(one.severity is Severity.CHEAT for one in self.findings or ()),
        }
        return "; but " * any(found.values()) + ", and ".join(words for words, holds in found.items() if holds)


# Needs of each category --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Needs:
    """The fields that an outcome of one category must have.

    Attributes:
        message: True if it needs a message.
        phase: True if it needs the phase in which it ended.
        facts: required fields of :class:`Facts`.
        one_of: fields of :class:`Facts` of which at least one is required.
    """

    message: bool = True
    phase: bool = False
    facts: tuple[str, ...] = ()
    one_of: tuple[str, ...] = ()

    def missing(self, *, message: str, phase: str | None, facts: Facts) -> list[str]:
        """Return the names of the fields that an outcome lacks."""
        lacking = [f"facts.{name}" for name in self.facts if getattr(facts, name) is None and not facts.withheld]
        if self.one_of and not facts.withheld and all(getattr(facts, name) is None for name in self.one_of):
            lacking.append(" or ".join(f"facts.{name}" for name in self.one_of))
        if self.phase and phase is None:
            lacking.insert(0, "phase")
        if self.message and not message:
            lacking.insert(0, "message")
        return lacking


_RAISED: Final = ("exception",)
_ENDED: Final = ("reason",)
_COMPARED: Final = ("output", "kind", "wrong", "of", "first")
#: Required facts, in addition to the message and to the phase of failures of candidates and problems.
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
    Category.NEEDS_GPU: ("instead_of",),
}
_ONE_OF: Final[dict[Category, tuple[str, ...]]] = {
    Category.GPU_OUT_OF_MEMORY: ("exception", "held_bytes"),
    Category.HOST_OUT_OF_MEMORY: ("exception", "reason"),
    Category.CRASHED: ("signal", "exit_status", "exception"),
    Category.WRONG_OUTPUT_STRUCTURE: ("structure", "output"),
    Category.TIMING_UNSTABLE: ("clocks", "foreign_processes"),
}
#: Required fields of each category's outcomes. :class:`kqueue.contract.Outcome` refuses an outcome without them.
NEEDS: Final[dict[Category, Needs]] = {
    category: Needs(
        message=info.blame is not Blame.NONE,
        phase=info.blame in {Blame.CANDIDATE, Blame.PROBLEM} or category is Category.TIMING_UNSTABLE,
        facts=_FACTS.get(category, ()),
        one_of=_ONE_OF.get(category, ()),
    )
    for category, info in CATEGORIES.items()
}
