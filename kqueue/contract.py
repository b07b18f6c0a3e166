"""The models that cross every boundary: requests, settings, outcomes and verdicts.

All of them are immutable and have a JSON form. They refuse unknown fields. Units stand in the names: ``_s`` seconds,
``_ms`` milliseconds, ``_bytes`` bytes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Final, Self, cast
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kqueue.categories import Blame, Category
from kqueue.errors import InvalidRequest
from kqueue.evidence import NEEDS, Environment, Evidence, Facts, Measurement, Part
from kqueue.states import Priority, Writer

#: The largest source of a problem or kernel, in bytes of UTF-8.
MAX_SOURCE_BYTES: Final = 1 << 20
#: The first line of a repository's files and of what is asked about its tests, in the place of problem and kernel; and
#: how large these may be, in bytes.
TESTS_LINE: Final = "# kqueue pytest\n"
MAX_TESTS_BYTES: Final = 16 << 20
#: The end of a candidate's output that is kept, in bytes.
LOG_TAIL_BYTES: Final = 16 << 10
GIB: Final = 1 << 30
#: The largest limit on bytes. The control groups and counters that enforce limits can hold it.
_MOST_BYTES: Final = 1 << 50
#: The SHA-256 of a text, as it is written everywhere: a regular expression.
HASH: Final = "[0-9a-f]{64}"
#: The name of a stored problem, which a request may give instead of its source: the SHA-256 of that source.
_PROBLEM_NAME: Final = re.compile(f"sha256:({HASH})")


class Backend(StrEnum):
    """The language or library that a kernel is written in; or what stands in a kernel's place."""

    CUDA = "cuda"
    TRITON = "triton"
    TORCH = "torch"
    CPP = "cpp"
    CUPY = "cupy"
    PYTEST = "pytest"
    """No kernel: tests of a repository, which takes the problem's place. ``kqueue pytest --fleet`` submits them."""


#: The backends of kernels.
KERNEL_BACKENDS: Final = tuple(backend for backend in Backend if backend is not Backend.PYTEST)
#: The backends that can be judged on the ``cpu`` lane (Triton through its interpreter).
CPU_BACKENDS: Final = frozenset({Backend.TORCH, Backend.CPP, Backend.TRITON, Backend.PYTEST})


def gpu_model(name: str) -> str:
    """Return the model in a GPU's lane, such as ``a100`` for the vendor's name ``NVIDIA A100-SXM4-80GB``."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"\b(nvidia|geforce|tesla|quadro)\b", " ", name.lower()))
    for before, word in zip(["", *words], words, strict=False):
        if re.fullmatch(r"[a-z]+[0-9]+[a-z0-9]*", word):
            return word[:31]
        if word.isdigit() and before.isalpha():
            return (before + word)[:31]
    return "-".join(words)[:31] or "unknown"


class Precision(StrEnum):
    """The floating dtype of the weights and inputs."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"


class Comparison(StrEnum):
    """The comparison that decides if a kernel's values are right. The result of the other is reported too."""

    STRICT = "strict"
    """Compare on every input distribution, and measure errors against the reference's own precision."""
    KERNELBENCH = "kernelbench"
    """Use ``torch.allclose`` on the problem's own inputs, as KernelBench does."""


class Sanitizer(StrEnum):
    """The tools of compute-sanitizer."""

    MEMCHECK = "memcheck"
    """Accesses outside of what was allocated, and misaligned ones."""
    RACECHECK = "racecheck"
    """Threads that use shared memory without waiting for each other."""
    INITCHECK = "initcheck"
    """Reads of global memory that nobody has written."""
    SYNCCHECK = "synccheck"
    """Barriers that not all threads reach."""


class Policy(StrEnum):
    """The consequence of a finding."""

    ALLOW = "allow"
    """Nothing. It is not looked for."""
    FLAG = "flag"
    """It is reported beside the verdict."""
    REJECT = "reject"
    """It ends the evaluation."""


class Phase(StrEnum):
    """The phases of an evaluation, each with its own deadline."""

    PREPARE = "prepare"
    REFERENCE = "reference"
    LOAD = "load"
    COMPILE = "compile"
    CONSTRUCT = "construct"
    CHECK = "check"
    TIME = "time"
    CLEANUP = "cleanup"
    EXAMINE = "examine"
    """The kernel runs once more under a tool; no verdict ends in it."""
    SELF_TEST = "canary"
    """The judge tests the GPU after the candidate's end."""


#: Unknown fields beyond this number are counted, not named one by one: a million of them would take minutes.
_FLOOD: Final = 32


class Bounded(BaseModel):
    """The base of models that strangers send. It refuses a flood of unknown fields in one line."""

    @model_validator(mode="before")
    @classmethod
    def _no_flood(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and len(cast("Mapping[Any, Any]", value)) > len(cls.model_fields) + _FLOOD:
            raise ValueError(f"only {len(cls.model_fields)} fields are known, and many more were given")
        return value


class _Model(Bounded):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


_Seconds = Annotated[float, Field(gt=0, le=3600)]


class Deadlines(_Model):
    """The deadline of each phase, in seconds."""

    reference_s: _Seconds = 120.0
    """To load the problem, make the inputs and run the reference on them."""
    load_s: _Seconds = 60.0
    """To import the kernel's source, compilation not included."""
    compile_s: _Seconds = 300.0
    """For all compilation at import together."""
    construct_s: _Seconds = 60.0
    """To construct ``ModelNew`` and move it to the device."""
    check_s: _Seconds = 60.0
    """For all checked calls together, including Triton's compilation at the first call."""
    time_s: _Seconds = 60.0
    """For all timed calls together."""
    examine_s: _Seconds = 300.0
    """For an examination, all its tools together."""

    @property
    def total_s(self) -> float:
        """The sum of all phases but an examination, in seconds. Import and compilation count twice, for builder and
        candidate."""
        return self.reference_s + 2 * (self.load_s + self.compile_s) + self.construct_s + self.check_s + self.time_s


class Limits(_Model):
    """The resources that a candidate may use."""

    host_memory_bytes: Annotated[int, Field(ge=256 << 20, le=_MOST_BYTES)] = 16 * GIB
    """Resident memory of the candidate's whole process tree, and of its files where they lie in memory. At most half of
    the host's memory counts."""
    output_bytes: Annotated[int, Field(ge=LOG_TAIL_BYTES, le=_MOST_BYTES)] = 8 << 20
    """Output to stdout and stderr together. One failed assertion on a GPU writes 1 MiB."""
    processes: Annotated[int, Field(ge=16, le=65536)] = 512
    """Threads and processes at once. It is enforced where the candidate has a user id of its own."""
    file_bytes: Annotated[int, Field(ge=1 << 20, le=_MOST_BYTES)] = 2 * GIB
    """Size of the largest file that it may write."""
    scratch_bytes: Annotated[int, Field(ge=1 << 20, le=_MOST_BYTES)] = 8 * GIB
    """Size of all its files together, at most ``host_memory_bytes`` where they lie in memory. There may be 20,000."""


class Timing(_Model):
    """The way in which the kernel is timed."""

    enabled: bool = True
    """Time the kernel."""
    calls: Annotated[int, Field(ge=5, le=10_000)] = 100
    """Most timed calls. There are fewer if the precision is reached earlier."""
    precision: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Timing stops when half the width of the median's 95 % confidence interval is this share of the median. 0 makes
    all calls."""
    warmup: Annotated[int, Field(ge=0, le=1_000)] = 3
    """Calls before the timed ones that do not count. The checked calls come before these."""
    cold_l2: bool = True
    """Flush the GPU's L2 cache before every timed call."""
    compiled_baseline: bool = False
    """Time the reference under ``torch.compile`` too."""


class Debug(_Model):
    """Switches that make a kernel's faults easier to find. They slow it down: with one of them nothing is timed."""

    launch_blocking: bool = False
    """Let each launch on a GPU return when its kernel has ended (``CUDA_LAUNCH_BLOCKING``), so that a fault is told
    where it happened and not at a later call."""
    device_asserts: bool = False
    """Let Triton check ``tl.device_assert`` and the overflow of integers (``TRITON_DEBUG``); on the lane ``cpu`` the
    former alone."""


class Examination(_Model):
    """Tools of the CUDA toolkit under which the kernel runs once more, in a process of its own, when all else is known.
    What they say is evidence and changes no verdict. They need a GPU."""

    sanitize: Annotated[tuple[Sanitizer, ...], Field(max_length=len(Sanitizer))] = ()
    """Tools of compute-sanitizer, one run each."""
    profile: bool = False
    """Count with Nsight Compute what each kernel of a call does, on a device that it has alone."""

    @field_validator("sanitize")
    @classmethod
    def _each_once(cls, value: tuple[Sanitizer, ...]) -> tuple[Sanitizer, ...]:
        return tuple(dict.fromkeys(value))

    def __bool__(self) -> bool:
        """True if something is asked for."""
        return bool(self.sanitize) or self.profile


class Policies(_Model):
    """The consequences for kernels that give right answers and look like cheats."""

    findings: Policy = Policy.FLAG
    """For findings of static rules. ``reject`` ends the evaluation as ``rejected_by_policy``, before the device is
    used."""
    decoys: Policy = Policy.FLAG
    """For kernels whose own GPU code does not do the work. ``reject`` ends the evaluation as ``reward_hack``. ``allow``
    saves the time of looking."""


class Tolerance(_Model):
    """The largest accepted error: ``|out - ref| <= atol + rtol * |ref|`` for every element."""

    atol: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    rtol: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Settings(_Model):
    """The settings of an evaluation."""

    precision: Precision = Precision.FP32
    """The floating dtype of the weights and inputs. What the problem makes in float32 or float64 is cast to it; what
    it makes in other dtypes stays."""
    keeps_float64: bool = False
    """Leave float64 weights and inputs as the problem makes them."""
    tf32: bool = False
    """Let products and convolutions of fp32 values use TF32, in the reference and the kernel alike. fp32 values then
    need to agree as fp16 values do. torch's own default is TF32 for convolutions alone."""
    checks: Annotated[int, Field(ge=1, le=100)] = 5
    """Number of input sets, each from a seed of its own, on which the kernel must agree with the reference."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 42
    """Seed that is set before both constructors, so that the weights agree. The judge chooses the seeds of inputs."""
    tolerance: Tolerance | None = None
    """None takes the problem's own. Where it gives none, that of the output's dtype: 1e-4 for fp32 and wider, 1e-2 for
    fp16 and bf16, 0.15 and 0.3 for the two fp8, equality for the rest."""
    comparison: Comparison = Comparison.STRICT
    """The comparison that decides if values are right."""
    policies: Policies = Policies()
    timing: Timing = Timing()
    debug: Debug = Debug()
    examine: Examination = Examination()
    deadlines: Deadlines = Deadlines()
    limits: Limits = Limits()
    max_attempts: Annotated[int, Field(ge=1, le=10)] = 3
    """Most attempts. There is another one only after a failure of the fleet."""

    @model_validator(mode="after")
    def _debugs_or_times(self) -> Self:
        if self.timing.enabled and self.debug != Debug():
            raise ValueError("a kernel is not timed under debug switches: set timing.enabled to false (--no-timing)")
        return self

    @property
    def total_s(self) -> float:
        """The sum of all deadlines that count for the evaluation, in seconds."""
        return self.deadlines.total_s + (self.deadlines.examine_s if self.examine else 0)


def _source(value: str, what: str) -> str:
    """Return a source as Python reads it: without a byte-order mark, and with ``\\n`` at the end of each line."""
    value = value.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    if not value.strip():
        raise ValueError(f"the {what}'s source is empty")
    try:
        size = len(value.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise ValueError(f"the {what}'s source is not valid UTF-8 text: {error.reason}") from None
    most = MAX_TESTS_BYTES if value.startswith(TESTS_LINE) else MAX_SOURCE_BYTES
    if size > most:
        raise ValueError(f"the {what}'s source has {size} bytes; at most {most} are accepted")
    if "\0" in value:
        raise ValueError(f"the {what}'s source holds a NUL character")
    return value


#: Postgres holds no NUL in text.
_Label = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00]+$")]


class Request(_Model):
    """One request to judge one kernel against one problem."""

    problem: str
    """Source of the reference, with ``class Model``, ``get_inputs()`` and ``get_init_inputs()``. Or the name of a
    stored problem: ``sha256:`` and the hash of its source. Sources are kept as Python reads them: without a byte-order
    mark, and with ``\\n`` at the end of each line."""
    kernel: str
    """Source of the candidate, with ``class ModelNew``."""
    backend: Backend
    """The language or library of the kernel."""
    lane: Annotated[str, Field(max_length=64)] = "auto"
    """``cpu``, ``gpu``, ``gpu.<model>`` or ``auto``, which is ``gpu`` if a GPU worker is alive and else ``cpu``."""
    settings: Settings = Settings()
    problem_label: _Label | None = None
    """A name for people. It identifies nothing."""
    kernel_label: _Label | None = None
    """A name for people. It identifies nothing."""
    batch: _Label | None = None
    """A name under which a producer finds its evaluations again."""
    idempotency_key: _Label | None = None
    """Submitting the same key again returns the same evaluation. What decides the verdict must be the same too:
    problem, kernel, settings and lane; and where ``reuse`` was allowed at first, it must be again."""
    priority: Priority = Priority.BATCH
    """``interactive`` comes before all of ``batch``, which keeps a tenth of the devices' time; ``idle`` comes last."""
    producer: _Label | None = None
    """Whose evaluation it is. Producers share the devices by the seconds that they used of late. Over HTTP a token is
    its own producer, whatever is said here."""
    reuse: bool = True
    """Whether the verdict of an equal evaluation will do: the same problem, kernel and settings, judged in an
    environment that serves the lane now. False has the kernel judged anew. The verdict says if it was reused."""
    queue_wait_s: Annotated[float, Field(gt=0, le=30 * 86400)] | None = None
    """Longest wait for a worker, in seconds, after which the evaluation ends as ``expired``. None waits for ever."""

    @field_validator("problem")
    @classmethod
    def _problem(cls, value: str) -> str:
        if re.fullmatch(r"\s*sha256:\S*\s*", value) and not _PROBLEM_NAME.fullmatch(value):
            raise ValueError("a stored problem is named by `sha256:` and 64 lower-case hexadecimal digits")
        return _source(value, "problem")

    @field_validator("kernel")
    @classmethod
    def _kernel(cls, value: str) -> str:
        return _source(value, "kernel")

    @field_validator("producer")
    @classmethod
    def _producer(cls, value: str | None) -> str | None:
        if value is not None and value.startswith("token:"):
            raise ValueError("names that begin with `token:` are for tokens: choose another")
        return value

    @model_validator(mode="after")
    def _tests_are_tests(self) -> Self:
        # A problem may be named by its hash alone: the judge sees whether it is of the same kind.
        if self.kernel.startswith(TESTS_LINE) is not (self.backend is Backend.PYTEST):
            raise ValueError("a repository's tests are no kernel: `kqueue pytest --fleet` submits them")
        watched = self.settings.examine not in (Examination(), Examination(sanitize=(Sanitizer.MEMCHECK,)))
        if self.backend is Backend.PYTEST and watched:
            raise ValueError("a repository's tests can be run under compute-sanitizer's memcheck alone")
        return self

    @model_validator(mode="after")
    def _examines_on_gpus(self) -> Self:
        if self.lane == "cpu" and self.settings.examine:
            raise ValueError("compute-sanitizer and Nsight Compute need a GPU: choose another lane than cpu")
        return self

    @property
    def names_problem(self) -> bool:
        """True if ``problem`` is the name of a stored problem, False if it is a source."""
        return _PROBLEM_NAME.fullmatch(self.problem) is not None

    @property
    def problem_name(self) -> str:
        """The name of the problem once its source is stored: ``sha256:`` and the hash."""
        return f"sha256:{self.problem_hash}"

    @property
    def problem_hash(self) -> str:
        """SHA-256 of the problem's source, in hex."""
        name = _PROBLEM_NAME.fullmatch(self.problem)
        return name[1] if name else hashlib.sha256(self.problem.encode()).hexdigest()

    @property
    def kernel_hash(self) -> str:
        """SHA-256 of the kernel's backend and source, in hex."""
        return hashlib.sha256(f"{self.backend}\0{self.kernel}".encode()).hexdigest()


def parse_request(fields: Mapping[str, Any]) -> Request:
    """Return the request with these fields.

    Raises:
        InvalidRequest: a field is wrong. The message names each such field and never repeats a source.
    """
    try:
        return Request(**{str(name): value for name, value in fields.items()})
    except ValidationError as error:
        raise InvalidRequest("; ".join(_complaint(fault) for fault in error.errors())) from None


def _complaint(fault: Mapping[str, Any]) -> str:
    name = ".".join(str(part) for part in fault["loc"]) or "request"
    match fault["type"]:
        case "missing":
            return f"{name}: is required"
        case "extra_forbidden":
            return f"{name}: there is no such field"
        case _:
            what = str(fault["msg"]).removeprefix("Value error, ")
            shown = "" if isinstance(fault["input"], Mapping) else repr(fault["input"])
            return (
                f"{name}: {what}"
                if name in {"problem", "kernel"} or not 0 < len(shown) <= 80
                else f"{name}: {what}, not {shown}"
            )


class _Result(Part):
    """The fields of an outcome, and what follows from them."""

    category: Category
    message: str = ""
    """One line for people: what happened and where."""
    phase: Phase | None = None
    """The phase in which it ended. None for a passed kernel."""
    facts: Facts = Facts()
    """The facts from which the category was decided."""
    runtime: Measurement | None = None
    """Time of the kernel. None unless it passed and was timed."""
    baseline: Measurement | None = None
    """Time of the eager reference, where it was taken."""
    log: str = ""
    """The last of the candidate's output, sanitised."""
    evidence: Evidence = Evidence()
    """What else was observed."""

    @property
    def blame(self) -> Blame:
        """The party whose failure it is. :attr:`Blame.NONE` for a passed kernel."""
        return self.category.blame

    @property
    def passed(self) -> bool:
        """True if the kernel was right."""
        return self.category is Category.PASSED

    @property
    def judged(self) -> bool:
        """True if it says something about the kernel: it was right, or failed by its own fault."""
        return self.blame in {Blame.NONE, Blame.CANDIDATE}

    @property
    def compiled(self) -> bool | None:
        """KernelBench's ``compiled``. None where it is unknown."""
        return self.category.info.compiled

    @property
    def correctness(self) -> bool | None:
        """KernelBench's ``correctness``. None where it is unknown."""
        return self.category.info.correctness

    @property
    def runtime_ms(self) -> float | None:
        """Median time of a call, in milliseconds. None unless the kernel passed and was timed."""
        return self.runtime.median_ms if self.runtime else None

    @property
    def baseline_ms(self) -> float | None:
        """Median time of the eager reference, in milliseconds. None where it was not taken."""
        return self.baseline.median_ms if self.baseline else None

    @property
    def timing_basis(self) -> str | None:
        """The clock that took the time: see :attr:`Measurement.basis`. None unless the kernel was timed."""
        return self.runtime.basis if self.runtime else None

    @property
    def speedup(self) -> float | None:
        """``baseline_ms / runtime_ms``. None unless one clock took both times, and both are above zero."""
        if self.runtime is None or self.baseline is None or self.runtime.basis != self.baseline.basis:
            return None
        if self.runtime.median_ms <= 0 or self.baseline.median_ms <= 0:
            return None
        return self.baseline.median_ms / self.runtime.median_ms

    def summary(self) -> dict[str, Any]:
        """Return the result as a flat JSON-safe record, with derived values and without log and evidence."""
        record = self.model_dump(mode="json", exclude={"log", "evidence", "environment", "runtime", "baseline"})
        return record | {
            "blame": str(self.blame),
            "compiled": self.compiled,
            "correctness": self.correctness,
            "runtime_ms": self.runtime_ms,
            "baseline_ms": self.baseline_ms,
            "speedup": self.speedup,
            "timing_basis": self.timing_basis,
        }


class Outcome(_Result):
    """The result of one attempt, as its judge writes it.

    Raises:
        ValidationError: a field is unknown or has another type, or the outcome lacks what its category needs
            (:data:`kqueue.evidence.NEEDS`).
    """

    @model_validator(mode="after")
    def _has_what_its_category_needs(self) -> Self:
        if lacking := NEEDS[self.category].missing(message=self.message, phase=self.phase, facts=self.facts):
            raise ValueError(f"the category {self.category} needs {', '.join(lacking)}")
        timed = self.runtime is not None or self.baseline is not None
        if timed and self.category is not Category.PASSED:
            raise ValueError(f"only a passed kernel has times, not one that ended as {self.category}")
        if self.category is Category.PASSED and self.evidence.verified_calls is not None and self.runtime is None:
            raise ValueError("timed calls were verified, so a passed kernel needs runtime")
        return self


class Verdict(_Result):
    """The one final outcome of an evaluation."""

    evaluation_id: UUID
    problem_label: str | None = None
    kernel_label: str | None = None
    backend: Backend
    lane: str
    attempts: int
    """Number of attempts. 0 if it never started, or if the verdict was reused."""
    written_by: Writer
    """The part of the fleet that recorded it."""
    environment: Environment | None = None
    """The device and software of the attempt, or of the one that a reused verdict is from. None where none got so
    far."""
    reused_from: UUID | None = None
    """The evaluation whose verdict this is, if an equal one was judged before: its times are no new measurement. It may
    have been removed since. None if this evaluation was judged itself."""
    judged_at: datetime | None = None
    """When that evaluation finished. None if this one was judged itself."""
    submitted_at: datetime
    finished_at: datetime

    @classmethod
    def load(cls, fields: Mapping[str, Any]) -> Self:
        """Return the verdict that a database or a server holds. Another version of kqueue may have written it.

        Unknown fields are left out, at every level. An entry of ``facts`` or ``evidence`` that cannot be read is left
        out too, and so is an ``environment`` that cannot be read.

        Raises:
            ValidationError: another field is missing or wrong.
        """
        try:
            return cls.model_validate(fields, extra="ignore")
        except ValidationError as error:
            return cls.model_validate(_readable(fields, error), extra="ignore")


#: What became of one evaluation: a local judge's, or a fleet's.
Result = Outcome | Verdict


def _readable(fields: Mapping[str, Any], error: ValidationError) -> dict[str, Any]:
    """Return ``fields`` without the entries of facts, evidence and environment at which ``error`` points."""
    kept = dict(fields)
    for fault in error.errors():
        match fault["loc"]:
            case ("environment", *_):
                kept["environment"] = None
            case ("facts" | "evidence" as part, str(entry), *_):
                kept[part] = {name: value for name, value in kept[part].items() if name != entry}
            case _:
                pass
    return kept
