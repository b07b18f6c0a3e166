"""The models of the interfaces: requests, settings, outcomes and verdicts.

All are immutable, have a JSON form and refuse unknown fields. Names end in their units: ``_s`` seconds, ``_ms``
milliseconds, ``_bytes`` bytes.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, Self, cast
from urllib.parse import urlsplit
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, ValidationError, computed_field, field_validator, model_validator

from kqueue import backends, shapes
from kqueue.backends import PYTEST
from kqueue.categories import Blame, Category
from kqueue.errors import InvalidRequest
from kqueue.evidence import NEEDS, Environment, Evidence, Facts, Measurement, Part, speedup_interval
from kqueue.profiles import Protocol
from kqueue.states import Priority, Purpose, Writer
from kqueue.text import InNotebooks

#: Maximum size of the source of a problem or kernel, in bytes of UTF-8.
MAX_SOURCE_BYTES: Final = 1 << 20
#: First line of the two texts that replace problem and kernel for a repository's tests: its files, and the options of
#: the pytest run.
TESTS_LINE: Final = "# kqueue pytest\n"
#: Maximum size in bytes of each of these two texts.
MAX_TESTS_BYTES: Final = 16 << 20
#: First line of a tree's text (:mod:`kqueue.trees`), and the maxima of its compressed bytes, files and characters.
TREE_LINE: Final = "# kqueue tree\n"
MAX_TREE_BYTES: Final = 64 << 20
MAX_TREE_FILES: Final = 20_000
_MAX_TREE_TEXT: Final = 92 << 20
#: Start of the second line of a source that names a tree, before the command that builds its extensions.
BUILD_LINE: Final = "# kqueue build"
#: Size in bytes of the end of a candidate's output that is stored.
LOG_TAIL_BYTES: Final = 16 << 10
GIB: Final = 1 << 30
#: Maximum value of limits in bytes, which the control groups and counters that enforce them can represent.
_MOST_BYTES: Final = 1 << 50
#: Minimum value of ``timing.max_error``. The clock's error between two processes alone makes 0.7 % on a GPU.
_LEAST_ERROR: Final = 0.01
#: Pattern of a SHA-256 in hexadecimal.
HASH: Final = "[0-9a-f]{64}"
#: Pattern of the name of a stored problem, which a request can give instead of its source: the source's SHA-256.
_PROBLEM_NAME: Final = re.compile(f"sha256:({HASH})")


#: First line of a source that names a tree, and the folder in it where imports begin. Then the command that builds it.
_NAMES_TREE: Final = re.compile(
    rf"# kqueue tree sha256:({HASH})(?: ([\w-][\w.-]*(?:/[\w-][\w.-]*)*))?\n(?:{BUILD_LINE}\b(.*)\n)?"
)


class NamedTree(NamedTuple):
    """The tree that a source names: the hash of its text, the folder in it where imports begin, and its build."""

    hash: str
    root: str
    build: tuple[str, ...] = ()
    """The command that builds the tree's extensions, in words."""


def named_tree(source: str) -> NamedTree | None:
    """Return the tree that the first line of a source names, or None."""
    found = _NAMES_TREE.match(source)
    if found is None:
        return None
    try:
        return NamedTree(found[1], found[2] or "", tuple(shlex.split(found[3] or "")))
    except ValueError:  # a quotation without an end, which no request has
        return NamedTree(found[1], found[2] or "")


def build_of(source: str) -> tuple[str, ...]:
    """Return the command that builds the tree that a source names, in words, or nothing."""
    tree = named_tree(source)
    return () if tree is None else tree.build


#: Name of a registered backend (:mod:`kqueue.backends`), or ``pytest`` for a repository's tests.
BackendName = Annotated[str, backends.Known]


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
    """The comparison that decides if a kernel's values are correct. The result of the other one is reported too."""

    STRICT = "strict"
    """Compare on every input distribution, and measure errors against the reference's own precision."""
    KERNELBENCH = "kernelbench"
    """Use ``torch.allclose`` on the problem's own inputs, as KernelBench does."""


class Sanitizer(StrEnum):
    """The tools of compute-sanitizer."""

    MEMCHECK = "memcheck"
    """Finds out-of-bounds and misaligned accesses."""
    RACECHECK = "racecheck"
    """Finds unsynchronized accesses to shared memory."""
    INITCHECK = "initcheck"
    """Finds reads of uninitialized global memory."""
    SYNCCHECK = "synccheck"
    """Finds barriers that not all threads reach."""


class Policy(StrEnum):
    """The consequence of a finding."""

    ALLOW = "allow"
    """The judge does not check for it."""
    FLAG = "flag"
    """The judge reports it next to the verdict."""
    REJECT = "reject"
    """It ends the evaluation."""


class Phase(StrEnum):
    """The phases of an evaluation, each with a deadline."""

    PREPARE = "prepare"
    REFERENCE = "reference"
    LOAD = "load"
    COMPILE = "compile"
    CONSTRUCT = "construct"
    CHECK = "check"
    TIME = "time"
    CLEANUP = "cleanup"
    EXAMINE = "examine"
    """The kernel runs once more under a tool. No verdict ends in this phase."""
    SELF_TEST = "self_test"
    """The judge runs the GPU self-test after the candidate's end."""


#: Number of unknown fields above which they are counted instead of named. Naming a million would take minutes.
_FLOOD: Final = 32


class Bounded(BaseModel):
    """The base of models that untrusted clients send. It refuses very many unknown fields in one line."""

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
    """The deadlines of the phases in seconds. Each shape of a problem, and each pass with gradients, has them."""

    reference_s: _Seconds = 120.0
    """Deadline for loading the problem, making the inputs and running the reference on them."""
    load_s: _Seconds = 60.0
    """Deadline for importing the kernel's source, without compilation."""
    compile_s: _Seconds = 300.0
    """Deadline for all compilation during import."""
    construct_s: _Seconds = 60.0
    """Deadline for constructing ``ModelNew`` and moving it to the device."""
    check_s: _Seconds = 60.0
    """Deadline for all checked calls, including Triton's compilation at the first call."""
    gpu_s: _Seconds = 3.0
    """Deadline for the GPU's work of a checked call once ``forward`` has returned. If 300 times the reference's time is
    longer, that applies. A GPU can take a few seconds to report a fault of many threads."""
    time_s: _Seconds = 60.0
    """Deadline for all timed calls."""
    examine_s: _Seconds = 300.0
    """Deadline for all tools of an examination."""

    @property
    def total_s(self) -> float:
        """The sum in seconds of all phases except an examination.

        Import and compilation count twice, because builder and candidate both do them.
        """
        return self.reference_s + 2 * (self.load_s + self.compile_s) + self.construct_s + self.check_s + self.time_s


class Limits(_Model):
    """The resource limits of a candidate."""

    host_memory_bytes: Annotated[int, Field(ge=256 << 20, le=_MOST_BYTES)] = 16 * GIB
    """Resident memory of the candidate's process tree, plus its files where they are stored in memory. At most half of
    the host's memory applies."""
    output_bytes: Annotated[int, Field(ge=LOG_TAIL_BYTES, le=_MOST_BYTES)] = 8 << 20
    """Output to stdout and stderr together. One failed assertion on a GPU writes 1 MiB."""
    processes: Annotated[int, Field(ge=16, le=65536)] = 512
    """Number of concurrent threads and processes. It is enforced where each candidate has a separate uid."""
    file_bytes: Annotated[int, Field(ge=1 << 20, le=_MOST_BYTES)] = 2 * GIB
    """Size of the largest file."""
    scratch_bytes: Annotated[int, Field(ge=1 << 20, le=_MOST_BYTES)] = 8 * GIB
    """Size of all files together, at most ``host_memory_bytes`` where they are stored in memory. The maximum number of
    files is 40,000."""


class Timing(_Model):
    """The settings of the kernel's timing."""

    purpose: Purpose = Purpose.RANK
    """Purpose of the times: ``check`` (no times), ``train`` (precise to 5 %), ``rank`` (1 %) or ``publish`` (0.5 %)."""
    calls: Annotated[int, Field(ge=5, le=10_000)] = 100
    """Maximum number of timed calls. Timing stops earlier once the purpose's precision is reached."""
    warmup: Annotated[int, Field(ge=0, le=1_000)] = 1
    """Number of warm-up calls before the timed ones and after the checked ones."""
    cold_l2: bool = True
    """Flush the GPU's L2 cache before every timed call."""
    compiled_baseline: bool = False
    """Time the reference under ``torch.compile`` too."""
    interpreter: bool = False
    """Time Triton kernels on the lane ``cpu`` too. Triton's interpreter runs them there, and its times say nothing
    about a GPU."""
    max_error: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Half the width of the speedup's 95 % interval, relative to the speedup, above which the outcome is
    ``timing_unstable``: at least 0.01 (a CPU reaches 0.03), or 0 for no limit. Each of n shapes has √n times it."""

    @field_validator("max_error")
    @classmethod
    def _can_be_reached(cls, value: float) -> float:
        if 0 < value < _LEAST_ERROR:
            raise ValueError(f"no GPU can be timed so precisely: use at least {_LEAST_ERROR}, or 0 for no limit")
        return value

    @property
    def enabled(self) -> bool:
        """True if the kernel is timed."""
        return self.purpose is not Purpose.CHECK

    def off(self) -> Self:
        """Return the settings without timing."""
        return self.model_copy(update={"purpose": Purpose.CHECK})


class Debug(_Model):
    """Debug switches that help to locate a kernel's faults. They slow the kernel down, so they exclude timing."""

    launch_blocking: bool = False
    """Make each kernel launch wait for the kernel's end (``CUDA_LAUNCH_BLOCKING``), so that the failing launch itself
    reports the fault, not a later call."""
    device_asserts: bool = False
    """Make Triton check ``tl.device_assert`` and integer overflow (``TRITON_DEBUG``). On the lane ``cpu`` it checks
    only the former."""


class Examination(_Model):
    """Tools of the CUDA toolkit under which the kernel runs once more, in a separate process.

    They run after all other phases. Their reports are evidence and do not change the verdict. They need a GPU.
    """

    sanitize: Annotated[tuple[Sanitizer, ...], Field(max_length=len(Sanitizer))] = ()
    """Tools of compute-sanitizer. Each has one run."""
    profile: bool = False
    """Profile each kernel of a call with Nsight Compute, with exclusive use of the device."""

    @field_validator("sanitize")
    @classmethod
    def _each_once(cls, value: tuple[Sanitizer, ...]) -> tuple[Sanitizer, ...]:
        return tuple(dict.fromkeys(value))

    def __bool__(self) -> bool:
        """Return True if any tool is requested."""
        return bool(self.sanitize) or self.profile


class Policies(_Model):
    """The consequences for kernels that give correct answers but look like cheats."""

    findings: Policy = Policy.FLAG
    """Policy for findings of static rules. ``reject`` ends the evaluation as ``rejected_by_policy``, before it uses the
    device."""
    decoys: Policy = Policy.FLAG
    """Policy for kernels whose own GPU code does not do the work. ``reject`` ends the evaluation as ``reward_hack``.
    ``allow`` saves the time of the check."""
    buffers: Policy = Policy.FLAG
    """Policy for kernels that do not have, or leave unchanged, registered buffers that the reference changes, such as
    running statistics. ``reject`` ends the evaluation as ``rejected_by_policy``. ``allow`` does not compare buffers."""
    downgrades: Policy = Policy.FLAG
    """Policy for values of a lower precision than the reference's. ``reject`` ends as ``rejected_by_policy``."""
    shapes: Policy = Policy.ALLOW
    """Policy for kernels that are right on the problem's own sizes only. ``flag`` and ``reject`` judge a kernel that
    passed, without times, on up to three other sizes, drawn at random. ``reject`` ends as ``rejected_by_policy``."""


class Tolerance(_Model):
    """The maximum error: ``|out - ref| <= atol + rtol * |ref|`` for every element, or for most of them."""

    atol: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    rtol: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    matched_ratio: Annotated[float, Field(ge=0.9, le=1, allow_inf_nan=False)] = 1.0
    """Smallest share of an output's elements that must be within that error, for low-bit formats, where one rounding
    step upstream changes some elements by much."""


#: One tolerance for all outputs, or one for each that ``forward`` returns, where None stands for the usual one.
Tolerances = Tolerance | Annotated[tuple[Tolerance | None, ...], Field(min_length=1)]


class Settings(_Model):
    """The settings of an evaluation."""

    precision: Precision = Precision.FP32
    """Floating dtype of the weights and inputs. The problem's float32 and float64 tensors are cast to it. Tensors of
    other dtypes are unchanged."""
    keeps_float64: bool = False
    """Exclude float64 weights and inputs from the cast."""
    tf32: bool = False
    """Allow TF32 in products and convolutions of fp32 values, in the reference and the kernel alike. The tolerance for
    fp32 values is then that for fp16. torch's default allows TF32 only in convolutions."""
    checks: Annotated[int, Field(ge=1, le=100)] = 5
    """Number of input sets, each with a separate seed, on which the kernel must agree with the reference."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Seed that is set before both constructors, so that the weights agree. None takes a new secret one for each
    evaluation, so that no kernel knows the weights. The judge chooses the seeds of inputs."""
    tolerance: Tolerance | None = None
    """Tolerance of the comparison. None takes the problem's. If the problem gives none, it depends on the output's
    dtype: 1e-4 for fp32 and wider, 1e-2 for fp16 and bf16, 0.15 for fp8 e4m3 and 0.3 for e5m2, one step for the
    formats e8m0 and e2m1, equality for the rest."""
    tolerances: Annotated[
        tuple[Tolerance | None, ...] | None, Field(max_length=128, exclude_if=lambda value: value is None)
    ] = None
    """Tolerance of each tensor that ``forward`` returns, in the place of one for all. None stands for the usual one."""
    comparison: Comparison = Comparison.STRICT
    """Comparison that decides if values are correct."""
    backward: bool = False
    """Compare the gradients of floating-point inputs and of parameters too, and time forward and backward together. A
    problem can ask for that by ``BACKWARD = True``."""
    profiles: Annotated[tuple[Protocol, ...], Field(max_length=len(Protocol))] = ()
    """Other projects' protocols by which the values are compared too. Their results are evidence and do not change the
    verdict."""
    policies: Policies = Policies()
    timing: Timing = Timing()
    debug: Debug = Debug()
    examine: Examination = Examination()
    deadlines: Deadlines = Deadlines()
    limits: Limits = Limits()
    max_attempts: Annotated[int, Field(ge=1, le=10)] = 3
    """Maximum number of attempts. Only a failure of the fleet causes another attempt."""

    @field_validator("profiles")
    @classmethod
    def _each_once(cls, value: tuple[Protocol, ...]) -> tuple[Protocol, ...]:
        return tuple(dict.fromkeys(value))

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.tolerance is not None and self.tolerances is not None:
            raise ValueError("settings have one tolerance for all outputs or a list of tolerances, not both")
        if self.timing.enabled and self.debug != Debug():
            raise ValueError("a kernel is not timed under debug switches: set timing.purpose to check (--no-timing)")
        return self

    @property
    def given_tolerance(self) -> Tolerances | None:
        """Tolerance of all outputs or of each, or None to take the problem's."""
        return self.tolerances or self.tolerance

    @property
    def total_s(self) -> float:
        """The sum in seconds of all deadlines that apply to the evaluation."""
        return self.deadlines.total_s + (self.deadlines.examine_s if self.examine else 0)


_OWN_RULES: Final = {"keeps_float64", "tf32", "checks", "seed", "tolerance", "comparison", "backward"}
#: Settings on which it depends what a verdict stands for, and their usual values: also each policy by its name.
RULES: Final[dict[str, Any]] = {
    **Settings().model_dump(include=_OWN_RULES, mode="json"),
    **Policies().model_dump(mode="json", exclude={"shapes"}),
    "cold_l2": True,
    "tolerances": None,
}


def rules_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of :data:`RULES`, from all settings in JSON, with another value than usual or ``reject``."""
    parts = [part for part in (settings.get("timing"), settings.get("policies"), settings) if isinstance(part, dict)]
    given = {name: value for part in cast("list[dict[str, Any]]", parts) for name, value in part.items()}
    return {name: given[name] for name, usual in RULES.items() if given.get(name, usual) not in (usual, "reject")}


def _source(value: str, what: str) -> str:
    """Return a source as Python reads it: without a byte-order mark, and with a newline at the end of each line."""
    value = value.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    if not value.strip():
        raise ValueError(f"the {what}'s source is empty")
    try:
        size = len(value.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise ValueError(f"the {what}'s source is not valid UTF-8 text: {error.reason}") from None
    most = MAX_TESTS_BYTES if value.startswith(TESTS_LINE) else MAX_SOURCE_BYTES
    if size > most:
        raise ValueError(f"the {what}'s source has {size} bytes, but at most {most} are accepted")
    if "\0" in value:
        raise ValueError(f"the {what}'s source holds a NUL character")
    if value.startswith(TREE_LINE.rstrip()):
        if (tree := named_tree(value)) is None:
            raise ValueError(f"the {what}'s first line names a tree as `{TREE_LINE.rstrip()} sha256:HASH [FOLDER]`")
        if value.partition("\n")[2].startswith(BUILD_LINE) and not tree.build:
            raise ValueError(f"the {what}'s second line names a build as `{BUILD_LINE} COMMAND`, quoted as in a shell")
    return value


#: Type of a label. Postgres cannot store NUL in text.
_Label = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00]+$")]


class Request(_Model):
    """A request to judge one kernel against one problem."""

    problem: str
    """Source of the reference, with ``class Model``, ``get_inputs()`` and ``get_init_inputs()``. Or the name of a
    stored problem: ``sha256:`` and the hash of its source. The database stores sources in the form in which Python
    reads them: without a byte-order mark, and with ``\\n`` at the end of each line."""
    kernel: str
    """Source of the candidate, with ``class ModelNew``."""
    trees: Annotated[tuple[str, ...], Field(max_length=2, exclude_if=lambda value: not value)] = ()
    """Texts of the trees that problem and kernel name in their first lines. A stored one need not be given."""
    backend: BackendName
    """Name of the kernel's language or library."""
    lane: Annotated[str, Field(max_length=64)] = "auto"
    """``cpu``, ``gpu``, ``gpu.<model>`` or ``auto``. ``auto`` is ``gpu`` if a GPU worker is alive, otherwise
    ``cpu``."""
    settings: Settings = Settings()
    problem_label: _Label | None = None
    """A name for people. It identifies nothing."""
    kernel_label: _Label | None = None
    """A name for people. It identifies nothing."""
    batch: _Label | None = None
    """Name of a group of evaluations, under which the producer can list them."""
    idempotency_key: _Label | None = None
    """Key of the request. Submitting it again returns the same evaluation. Problem, kernel, settings and lane must be
    the same too, and ``reuse`` must still be allowed if it was at first."""
    priority: Priority = Priority.BATCH
    """``interactive`` precedes all of ``batch``, which keeps a tenth of the devices' time. ``idle`` comes last."""
    producer: _Label | None = None
    """Name under which the evaluation's device seconds are counted. It is not the owner. Producers share the devices
    according to the seconds that they used recently. Over HTTP each token is a producer, and this field is ignored."""
    reuse: bool = True
    """Accept the verdict of an equal evaluation: one with the same problem, kernel and settings, judged in an
    environment that serves the lane now. False requires a new judgement. The verdict says if it was reused."""
    queue_wait_s: Annotated[float, Field(gt=0, le=30 * 86400)] | None = None
    """Maximum wait in seconds for a worker, after which the evaluation ends as ``expired``. None waits without
    limit."""
    callback_url: Annotated[str, Field(max_length=2000)] | None = None
    """``http`` or ``https`` URL to which `kqueue serve` posts the verdict. An evaluation has the URL of the submission
    that created it."""
    batch_callback_url: Annotated[str, Field(max_length=2000)] | None = None
    """URL to which `kqueue serve` posts the counts of the batch whenever all its evaluations have ended. The last
    submission's URL counts."""

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

    @field_validator("trees")
    @classmethod
    def _trees(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for tree in value:
            if not tree.startswith(TREE_LINE) or not len(tree) <= _MAX_TREE_TEXT or "\0" in tree:
                raise ValueError(f"a tree is a text of kqueue.trees, of at most {_MAX_TREE_TEXT >> 20} MiB")
        return value

    @field_validator("producer")
    @classmethod
    def _producer(cls, value: str | None) -> str | None:
        if value is not None and value.startswith("token:"):
            raise ValueError("names that begin with `token:` are reserved for tokens: choose another")
        return value

    @field_validator("callback_url", "batch_callback_url")
    @classmethod
    def _is_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        named = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and parts.username is None
        if not (named and value.isascii() and value.isprintable() and " " not in value):
            raise ValueError("use a URL such as https://host/path, in ASCII and without a user's name")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.batch_callback_url is not None and self.batch is None:
            raise ValueError("batch_callback_url needs a batch: name one, or use callback_url")
        if self.tree_texts.keys() - self.tree_names:
            raise ValueError("trees: neither the problem's nor the kernel's first line names one of them")
        # A problem can be named by its hash alone, so the judge checks that it is a repository's files.
        if self.kernel.startswith(TESTS_LINE) is not (self.backend == PYTEST):
            raise ValueError("a repository's tests are not a kernel: `kqueue pytest --fleet` submits them")
        examined = self.settings.examine not in (Examination(), Examination(sanitize=(Sanitizer.MEMCHECK,)))
        if self.backend == PYTEST and examined:
            raise ValueError("a repository's tests can only be examined with compute-sanitizer's memcheck")
        if self.lane == "cpu" and self.settings.examine:
            raise ValueError("compute-sanitizer and Nsight Compute need a GPU: choose another lane than cpu")
        if (self.settings.examine or self.settings.backward) and self.ranks:
            what = "compute-sanitizer, Nsight Compute and gradients"
            raise ValueError(f"{what} are not for kernels in several ranks, and the problem states WORLD")
        named = [[name in text for text in (self.problem, self.kernel)] for name in ("ModelNew", "get_inputs")]
        if named == [[True, False], [False, True]]:
            raise ValueError("problem and kernel are swapped: the problem defines ModelNew, and the kernel get_inputs")
        return self

    @property
    def tree_names(self) -> frozenset[str]:
        """The hashes of the trees that the sources name."""
        return frozenset(tree.hash for source in (self.problem, self.kernel) if (tree := named_tree(source)))

    @property
    def tree_texts(self) -> dict[str, str]:
        """The given trees by their hashes."""
        return {hashlib.sha256(tree.encode()).hexdigest(): tree for tree in self.trees}

    def tree_of(self, source: str) -> str:
        """Return the text of the tree that a source names, or nothing. Raise KeyError if it was not given."""
        tree = named_tree(source)
        return "" if tree is None else self.tree_texts[tree.hash]

    @property
    def ranks(self) -> int:
        """The number of ranks that the problem states, or 0 if it states none, or not in the right form."""
        return 0 if self.backend == PYTEST else max(0, shapes.ranks(self.problem))

    @property
    def names_problem(self) -> bool:
        """True if ``problem`` is the name of a stored problem, False if it is source."""
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
    """Return the request with these fields. An InvalidRequest names each wrong field, and never repeats a source."""
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
            text = str(fault["msg"]).removeprefix("Value error, ")
            shown = "" if isinstance(fault["input"], Mapping) else repr(fault["input"])
            return (
                f"{name}: {text}"
                if name in {"problem", "kernel"} or not 0 < len(shown) <= 80
                else f"{name}: {text}, not {shown}"
            )


class _Result(Part, InNotebooks):
    """The fields of an outcome, and the values derived from them."""

    category: Category
    message: str = ""
    """One line for people: the failure and its place."""
    phase: Phase | None = None
    """Phase in which the evaluation ended. None for a passed kernel."""
    facts: Facts = Facts()
    """Facts from which the category was decided."""
    runtime: Measurement | None = None
    """Time of the kernel. None unless it passed and was timed."""
    baseline: Measurement | None = None
    """Time of the eager reference, if measured."""
    log: str = ""
    """End of the candidate's output, without control characters."""
    evidence: Evidence = Evidence()
    """All other observations."""

    @property
    def blame(self) -> Blame:
        """The responsible party. :attr:`Blame.NONE` for a passed kernel."""
        return self.category.blame

    @property
    def passed(self) -> bool:
        """True if the kernel was correct."""
        return self.category is Category.PASSED

    @property
    def judged(self) -> bool:
        """True if the verdict is about the kernel: it was correct, or failed by its own fault."""
        return self.blame in {Blame.NONE, Blame.CANDIDATE}

    @property
    def compiled(self) -> bool | None:
        """KernelBench's ``compiled``. None if unknown."""
        return self.category.info.compiled

    @property
    def correctness(self) -> bool | None:
        """KernelBench's ``correctness``. None if unknown."""
        return self.category.info.correctness

    @property
    def runtime_ms(self) -> float | None:
        """Median time of a call in milliseconds. None unless the kernel passed and a time above zero was measured."""
        return self.runtime.median_ms if self.runtime and self.runtime.median_ms > 0 else None

    @property
    def baseline_ms(self) -> float | None:
        """Median time of the eager reference in milliseconds. None if no time above zero was measured."""
        return self.baseline.median_ms if self.baseline and self.baseline.median_ms > 0 else None

    @property
    def timing_basis(self) -> str | None:
        """The clock that took the time (:attr:`Measurement.basis`). None unless the kernel was timed."""
        return self.runtime.basis if self.runtime else None

    @property
    def speedup(self) -> float | None:
        """``baseline_ms / runtime_ms``. None unless one clock took both times and both are above zero."""
        if self.runtime is None or self.baseline is None or self.runtime.basis != self.baseline.basis:
            return None
        return self.baseline_ms / self.runtime_ms if self.baseline_ms and self.runtime_ms else None

    @property
    def device_s(self) -> float:
        """Seconds for which the evaluation used a device exclusively."""
        return sum(seconds for step, seconds in (self.evidence.durations_s or {}).items() if step.startswith("alone_"))

    @property
    def speedup_interval(self) -> tuple[float, float] | None:
        """The 95 % interval of :attr:`speedup`, from the intervals of both times. None if one is unknown."""
        if self.speedup is None or self.runtime is None or self.baseline is None:
            return None
        return speedup_interval(self.speedup, self.runtime.error, self.baseline.error)

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
            "speedup_interval": self.speedup_interval,
            "timing_basis": self.timing_basis,
        }


class Outcome(_Result):
    """The result of one attempt, which its judge writes. It has the fields that its category needs."""

    @model_validator(mode="after")
    def _has_what_its_category_needs(self) -> Self:
        if lacking := NEEDS[self.category].missing(message=self.message, phase=self.phase, facts=self.facts):
            raise ValueError(f"the category {self.category} needs {', '.join(lacking)}")
        timed = self.runtime is not None or self.baseline is not None
        if timed and self.category is not Category.PASSED:
            raise ValueError(f"only a passed kernel has times, but this one ended as {self.category}")
        if self.category is Category.PASSED and self.evidence.verified_calls is not None and self.runtime is None:
            raise ValueError("timed calls were verified, so a passed kernel needs runtime")
        return self


class Verdict(_Result):
    """The final outcome of an evaluation."""

    evaluation_id: UUID
    problem_label: str | None = None
    kernel_label: str | None = None
    backend: str
    lane: str
    attempts: int
    """Number of attempts. 0 if none started, or if the verdict was reused."""
    written_by: Writer
    """The process that recorded the verdict."""
    environment: Environment | None = None
    """The device and software of the attempt that gave this verdict, reused or not. None if no attempt recorded
    them."""
    reused_from: UUID | None = None
    """The earlier, equal evaluation whose verdict was reused. Its times are not a new measurement. Retention can have
    removed it since. None if this evaluation was judged itself."""
    judged_at: datetime | None = None
    """Time when that earlier evaluation finished. None if this one was judged itself."""
    submitted_at: datetime
    finished_at: datetime

    if not TYPE_CHECKING:
        # The JSON form has the derived values too. Type checkers see the same properties in `_Result`.
        blame = computed_field(_Result.blame)
        compiled = computed_field(_Result.compiled)
        correctness = computed_field(_Result.correctness)
        runtime_ms = computed_field(_Result.runtime_ms)
        baseline_ms = computed_field(_Result.baseline_ms)
        speedup = computed_field(_Result.speedup)
        timing_basis = computed_field(_Result.timing_basis)

    @classmethod
    def load(cls, fields: Mapping[str, Any]) -> Self:
        """Return a verdict that a database or a server holds, possibly written by another version of kqueue.

        Unknown fields are ignored at every level. An entry of ``facts`` or ``evidence`` that cannot be read is ignored
        too, and so is an ``environment`` that cannot be read. Raise ValidationError if another field is missing or
        wrong.
        """
        try:
            return cls.model_validate(fields, extra="ignore")
        except ValidationError as error:
            return cls.model_validate(_readable(fields, error), extra="ignore")


#: The result of one evaluation: an outcome of a local judge, or a verdict of a fleet.
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
