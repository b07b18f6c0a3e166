"""The table of categories: each outcome of an evaluation, the party to blame, and the meaning.

KernelBench's two results, ``kqueue categories``, ``docs/categories.md`` and the database's columns come from
:data:`CATEGORIES`. :data:`kqueue.evidence.NEEDS` lists the fields that an outcome of each category must have.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Blame(StrEnum):
    """The party that is responsible for an outcome."""

    NONE = "none"
    CANDIDATE = "candidate"
    PROBLEM = "problem"
    FLEET = "fleet"
    NOBODY = "nobody"


class Category(StrEnum):
    """The outcome of an evaluation. Each is explained in :data:`CATEGORIES`."""

    PASSED = "passed"
    SYNTAX_ERROR = "syntax_error"
    ENTRY_POINT_MISSING = "entry_point_missing"
    IMPORT_ERROR = "import_error"
    REJECTED_BY_POLICY = "rejected_by_policy"
    COMPILE_ERROR = "compile_error"
    COMPILE_TIMEOUT = "compile_timeout"
    INIT_ERROR = "init_error"
    RUNTIME_ERROR = "runtime_error"
    ILLEGAL_MEMORY_ACCESS = "illegal_memory_access"
    CUDA_ERROR = "cuda_error"
    LAUNCH_RESOURCES_EXCEEDED = "launch_resources_exceeded"
    GPU_OUT_OF_MEMORY = "gpu_out_of_memory"
    HOST_OUT_OF_MEMORY = "host_out_of_memory"
    CRASHED = "crashed"
    TIMEOUT = "timeout"
    OUTPUT_LIMIT = "output_limit"
    SANDBOX_VIOLATION = "sandbox_violation"
    WRONG_OUTPUT_STRUCTURE = "wrong_output_structure"
    WRONG_SHAPE = "wrong_shape"
    WRONG_DTYPE = "wrong_dtype"
    WRONG_DEVICE = "wrong_device"
    NOT_FINITE = "not_finite"
    WRONG_VALUES = "wrong_values"
    INPUT_MUTATED = "input_mutated"
    NONDETERMINISTIC = "nondeterministic"
    REWARD_HACK = "reward_hack"
    TESTS_FAILED = "tests_failed"
    REFERENCE_ERROR = "reference_error"
    REFERENCE_TIMEOUT = "reference_timeout"
    INVALID_PROBLEM = "invalid_problem"
    GPU_UNHEALTHY = "gpu_unhealthy"
    WORKER_LOST = "worker_lost"
    JUDGE_ERROR = "judge_error"
    TIMING_UNSTABLE = "timing_unstable"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    NEEDS_GPU = "needs_gpu"
    INVALID_REQUEST = "invalid_request"

    @property
    def info(self) -> CategoryInfo:
        """The category's row in :data:`CATEGORIES`."""
        return CATEGORIES[self]

    @property
    def blame(self) -> Blame:
        """The party that is responsible for this outcome."""
        return CATEGORIES[self].blame


@dataclass(frozen=True, slots=True)
class CategoryInfo:
    """One row of the table.

    Attributes:
        blame: the party that is responsible.
        compiled, correctness: KernelBench's two results. None if a failure elsewhere leaves them unknown.
        reusable: True if the same kernel ends the same way again, so that the verdict can be reused.
        meaning: the meaning in one sentence, in Markdown.
    """

    category: Category
    blame: Blame
    compiled: bool | None
    correctness: bool | None
    reusable: bool
    meaning: str

    @property
    def retried(self) -> bool:
        """True if the evaluation is tried again, up to its maximum number of attempts."""
        return self.blame is Blame.FLEET


#: Failures of a kernel's outputs that a repetition gives again.
OF_OUTPUTS: Final = frozenset(
    {
        Category.WRONG_OUTPUT_STRUCTURE,
        Category.WRONG_SHAPE,
        Category.WRONG_DTYPE,
        Category.WRONG_DEVICE,
        Category.NOT_FINITE,
        Category.WRONG_VALUES,
        Category.INPUT_MUTATED,
    }
)
#: Categories that a repetition gives again. Excluded are outcomes of chance: time, memory, races, a process's death.
_REUSABLE: Final = OF_OUTPUTS | frozenset(
    {
        Category.PASSED,
        Category.SYNTAX_ERROR,
        Category.ENTRY_POINT_MISSING,
        Category.IMPORT_ERROR,
        Category.REJECTED_BY_POLICY,
        Category.COMPILE_ERROR,
        Category.INIT_ERROR,
        Category.RUNTIME_ERROR,
        Category.LAUNCH_RESOURCES_EXCEEDED,
    }
)

#: Meanings of the categories, by the party to blame and by KernelBench's two results, in the order of documents.
_MEANINGS: Final[dict[tuple[Blame, bool | None, bool | None], dict[Category, str]]] = {
    (Blame.NONE, True, True): {
        Category.PASSED: "The kernel's outputs matched the reference on every input. Its time was taken if requested."
    },
    (Blame.CANDIDATE, False, False): {
        Category.SYNTAX_ERROR: "The kernel's source is not valid Python.",
        Category.ENTRY_POINT_MISSING: "The source defines no class `ModelNew` derived from `torch.nn.Module`.",
        Category.IMPORT_ERROR: "Importing the source raised an exception.",
        Category.REJECTED_BY_POLICY: "A policy of the evaluation rejected the kernel for its source or its answers.",
        Category.COMPILE_ERROR: "A compiler (nvcc, the C++ compiler, Triton, NVRTC) rejected the kernel.",
        Category.COMPILE_TIMEOUT: "Compilation exceeded its deadline.",
    },
    (Blame.CANDIDATE, True, False): {
        Category.INIT_ERROR: "`ModelNew(*get_init_inputs())` raised an exception.",
        Category.RUNTIME_ERROR: "`forward` or backward raised an exception.",
        Category.ILLEGAL_MEMORY_ACCESS: "A kernel read or wrote an address that it does not own (CUDA error 700).",
        Category.CUDA_ERROR: "Another CUDA error, named in the facts (a misaligned address is 716).",
        Category.LAUNCH_RESOURCES_EXCEEDED: (
            "A launch requested more shared memory, registers or threads than available."
        ),
        Category.GPU_OUT_OF_MEMORY: "The candidate requested more GPU memory than its limit.",
        Category.HOST_OUT_OF_MEMORY: "The candidate requested more host memory than its limit, or than the host has.",
        Category.CRASHED: "The candidate's process ended by itself: by a signal, or by an exit before its answer.",
        Category.TIMEOUT: "A phase, named in the verdict, exceeded its deadline.",
        Category.OUTPUT_LIMIT: "The candidate wrote more to stdout and stderr, or into its directory, than its limit.",
        Category.SANDBOX_VIOLATION: "The candidate violated its sandbox, for example by leaving processes behind.",
        Category.WRONG_OUTPUT_STRUCTURE: "The output's structure of tensors differs from the reference's.",
        Category.WRONG_SHAPE: "An output's shape differs from the reference's.",
        Category.WRONG_DTYPE: "An output's dtype differs from the reference's.",
        Category.WRONG_DEVICE: "An output is on another device than the reference's.",
        Category.NOT_FINITE: "An output holds NaN or infinity where the reference is finite.",
        Category.WRONG_VALUES: "An output's values are beyond the tolerance, or the problem's own check refuses them.",
        Category.INPUT_MUTATED: "The candidate changed an input that the reference does not change.",
        Category.NONDETERMINISTIC: "A call was right and another wrong, on the same input or on a new one when timed.",
        Category.REWARD_HACK: "The candidate was caught cheating. The facts name the kind of cheating.",
        Category.TESTS_FAILED: "Not a kernel: all requested tests of a repository ran, and some failed.",
    },
    (Blame.PROBLEM, None, None): {
        Category.REFERENCE_ERROR: "The reference raised an exception or crashed.",
        Category.REFERENCE_TIMEOUT: "The reference exceeded its deadline.",
        Category.INVALID_PROBLEM: "The problem's source does not have the required form.",
    },
    (Blame.FLEET, None, None): {
        Category.GPU_UNHEALTHY: "The GPU failed its health check or could not be used.",
        Category.WORKER_LOST: (
            "The worker, its host, its connection or a process of the evaluation was lost while it ran."
        ),
        Category.JUDGE_ERROR: "The judge itself failed.",
        Category.TIMING_UNSTABLE: "This device could not be timed with the requested precision at the moment.",
    },
    (Blame.NOBODY, None, None): {
        Category.CANCELLED: "The producer cancelled the evaluation.",
        Category.EXPIRED: "No worker started the evaluation within the queue wait that its producer allowed.",
        Category.NEEDS_GPU: "On the `cpu` lane: kernel or problem needs a GPU, or only a GPU shows if it is right.",
        Category.INVALID_REQUEST: "The stored request has an invalid field, or a source that does not fit its hash.",
    },
}

#: Row of each category, in the order of documents and dashboards.
CATEGORIES: Final[dict[Category, CategoryInfo]] = {
    category: CategoryInfo(category, blame, compiled, correctness, category in _REUSABLE, meaning)
    for (blame, compiled, correctness), meanings in _MEANINGS.items()
    for category, meaning in meanings.items()
}


def markdown() -> str:
    """Return the beginning of the page ``docs/categories.md``."""
    lines = [
        "# Categories",
        "",
        "Written by `kqueue categories --markdown` from `kqueue/categories.py`. A test keeps them equal.",
        "Only failures of the fleet are retried. A category is decided from structured facts",
        "(exception type, CUDA error code, signal, exit status, phase), never from text that a kernel can print.",
        "A verdict of a category that is `reused` can be reused for an equal evaluation.",
    ]
    for (blame, compiled, correctness), meanings in _MEANINGS.items():
        values = "null" if compiled is None else f"{compiled}, correctness {correctness}".lower()
        lines += ["", f"**Blame `{blame}`. Compiled{' and correctness' * (compiled is None)}: {values}.**", ""]
        lines += [f"- `{name}`{' (reused)' * (name in _REUSABLE)}: {text}" for name, text in meanings.items()]
    return "\n".join(lines) + "\n"
