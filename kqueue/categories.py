"""The one table of categories: each outcome of an evaluation, who is to blame, and what it means.

KernelBench's two results, ``kqueue categories``, ``docs/categories.md`` and the database's columns come from
:data:`CATEGORIES`. :data:`kqueue.evidence.NEEDS` says what an outcome of each category must have.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Blame(StrEnum):
    """The party whose failure an outcome is."""

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

    @property
    def info(self) -> CategoryInfo:
        """The category's row of the table."""
        return CATEGORIES[self]

    @property
    def blame(self) -> Blame:
        """The party whose failure this is."""
        return CATEGORIES[self].blame


@dataclass(frozen=True, slots=True)
class CategoryInfo:
    """One row of the table.

    Attributes:
        category: the category.
        blame: the party whose failure it is.
        compiled, correctness: KernelBench's two results. None if something else failed, so that nothing is known of the
            kernel.
        reusable: True if the same kernel would end so again, so that an equal evaluation may have the verdict.
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
        """True if another attempt is made, until the evaluation's attempts are used up."""
        return self.blame is Blame.FLEET


#: What comes out the same again. Not what may depend on luck: time, memory, races, a process's death.
_REUSABLE: Final = frozenset(
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
        Category.WRONG_OUTPUT_STRUCTURE,
        Category.WRONG_SHAPE,
        Category.WRONG_DTYPE,
        Category.WRONG_DEVICE,
        Category.NOT_FINITE,
        Category.WRONG_VALUES,
        Category.INPUT_MUTATED,
    }
)


def _rows() -> list[CategoryInfo]:
    c, rows = Category, list[CategoryInfo]()

    def add(blame: Blame, compiled: bool | None, correct: bool | None, meanings: dict[Category, str]) -> None:
        rows.extend(CategoryInfo(k, blame, compiled, correct, k in _REUSABLE, v) for k, v in meanings.items())

    add(
        Blame.NONE,
        True,
        True,
        {c.PASSED: "The kernel's outputs matched the reference on every input, and its time was taken if asked for."},
    )
    add(
        Blame.CANDIDATE,
        False,
        False,
        {
            c.SYNTAX_ERROR: "The kernel's source is not valid Python.",
            c.ENTRY_POINT_MISSING: "The source defines no class `ModelNew` derived from `torch.nn.Module`.",
            c.IMPORT_ERROR: "Executing the source at import raised an exception.",
            c.REJECTED_BY_POLICY: "A static rule that the evaluation's policy enforces refused the source.",
            c.COMPILE_ERROR: "A compiler (nvcc, the C++ compiler, Triton, NVRTC) refused the kernel.",
            c.COMPILE_TIMEOUT: "Compilation did not end within its deadline.",
        },
    )
    add(
        Blame.CANDIDATE,
        True,
        False,
        {
            c.INIT_ERROR: "`ModelNew(*get_init_inputs())` raised an exception.",
            c.RUNTIME_ERROR: "`forward` raised an exception.",
            c.ILLEGAL_MEMORY_ACCESS: "A kernel read or wrote an address that it does not own (CUDA error 700).",
            c.CUDA_ERROR: "Another CUDA error, named in the facts (a misaligned address is 716).",
            c.LAUNCH_RESOURCES_EXCEEDED: "A launch asked for more shared memory, registers or threads than there are.",
            c.GPU_OUT_OF_MEMORY: "The candidate asked for more GPU memory than it may have.",
            c.HOST_OUT_OF_MEMORY: "The candidate asked for more host memory than it may have.",
            c.CRASHED: "The candidate's process ended by itself: a signal, or an exit before it had answered.",
            c.TIMEOUT: "A phase, named in the verdict, did not end within its deadline.",
            c.OUTPUT_LIMIT: "The candidate wrote more to stdout and stderr, or into its directory, than it may.",
            c.SANDBOX_VIOLATION: "The candidate did what its sandbox forbids, such as leaving processes behind.",
            c.WRONG_OUTPUT_STRUCTURE: "The output is not the reference's arrangement of tensors.",
            c.WRONG_SHAPE: "An output's shape differs from the reference's.",
            c.WRONG_DTYPE: "An output's dtype differs from the reference's.",
            c.WRONG_DEVICE: "An output lives on another device than the reference's.",
            c.NOT_FINITE: "An output holds NaN or infinity where the reference is finite.",
            c.WRONG_VALUES: "An output's values differ from the reference's beyond the tolerance.",
            c.INPUT_MUTATED: "The candidate changed an input that the reference leaves alone.",
            c.NONDETERMINISTIC: "The same input gave a right answer once and a wrong one once.",
            c.REWARD_HACK: "The candidate was caught cheating; the facts say how.",
            c.TESTS_FAILED: "No kernel: tests of a repository failed, and all that were to run have run.",
        },
    )
    add(
        Blame.PROBLEM,
        None,
        None,
        {
            c.REFERENCE_ERROR: "The reference raised an exception or crashed.",
            c.REFERENCE_TIMEOUT: "The reference did not end within its deadline.",
            c.INVALID_PROBLEM: "The problem's source does not have the required form.",
        },
    )
    add(
        Blame.FLEET,
        None,
        None,
        {
            c.GPU_UNHEALTHY: "The GPU failed its health check or could not be used.",
            c.WORKER_LOST: "The worker, its host, its connection or a process of the evaluation was lost while it ran.",
            c.JUDGE_ERROR: "The judge itself failed.",
            c.TIMING_UNSTABLE: "No timing of the asked precision could be taken on this device now.",
        },
    )
    add(
        Blame.NOBODY,
        None,
        None,
        {
            c.CANCELLED: "The producer cancelled the evaluation.",
            c.EXPIRED: "The evaluation was not started within the queue wait that its producer allowed.",
        },
    )
    return rows


#: The row of each category, in the order of documents and dashboards.
CATEGORIES: Final[dict[Category, CategoryInfo]] = {row.category: row for row in _rows()}


def markdown() -> str:
    """Return the page ``docs/categories.md``."""

    def cell(value: bool | None) -> str:
        return "null" if value is None else str(value).lower()

    lines = [
        "# Categories",
        "",
        "Made from the table in `kqueue/categories.py` by `kqueue categories --markdown`; a test keeps them equal.",
        "Only failures blamed on the fleet are tried again. A category is decided from structured facts",
        "(exception type, CUDA error code, signal, exit status, phase), never from text that a kernel can print.",
        "`reused` says whether an equal evaluation may have the verdict.",
        "",
        "| category | blame | compiled | correctness | reused | meaning |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| `{r.category}` | {r.blame} | {cell(r.compiled)} | {cell(r.correctness)} | {cell(r.reusable)} "
        f"| {r.meaning} |"
        for r in CATEGORIES.values()
    ]
    return "\n".join(lines) + "\n"
