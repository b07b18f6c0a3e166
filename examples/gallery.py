"""The gallery: problems, correct kernels, and wrong kernels for every category.

It is a demo, test data and documentation. Each entry names its expected category::

    for entry in entries("cpu"):
        verdict = client.submit(entry.request("cpu")).wait()
        assert verdict.category is entry.expected

The files contain sources as users submit them, and do not depend on this table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kqueue.categories import Blame, Category
from kqueue.contract import Deadlines, Limits, Precision, Request, Settings

HERE: Final = Path(__file__).resolve().parent
BOTH: Final = frozenset({"cpu", "gpu"})
CPU: Final = frozenset({"cpu"})
GPU: Final = frozenset({"gpu"})


@dataclass(frozen=True, slots=True)
class Entry:
    """One kernel for one problem, and the expected category.

    Attributes:
        name: unique name, such as ``good/triton/softmax`` or ``bad/segfault``.
        lanes: lanes that can judge it: ``cpu``, ``gpu`` or both.
        settings: settings of the evaluation. The ``cpu`` lane uses fewer checks and calls (see :meth:`request`).
        note: first line of the docstring of the candidate, or of a faulty problem.
    """

    name: str
    problem: Path
    kernel: Path
    backend: str
    expected: Category
    lanes: frozenset[str]
    settings: Settings
    note: str

    def request(self, lane: str) -> Request:
        """Return the request to submit.

        The slow ``cpu`` lane gets at most 3 checks and 20 timed calls, and Triton's interpreter at most 2 and 5.

        Raises:
            ValueError: the entry is not for this lane.
        """
        kind = lane.partition(".")[0]
        if kind not in self.lanes:
            raise ValueError(f"{self.name} is for {' and '.join(sorted(self.lanes))}, not for the lane {lane!r}")
        settings = self.settings
        if kind == "cpu":
            checks, calls, warmup = (2, 5, 1) if self.backend == "triton" else (3, 20, 3)
            timing = settings.timing.model_copy(update={"calls": calls, "warmup": warmup})
            settings = settings.model_copy(update={"checks": min(checks, settings.checks), "timing": timing})
        return Request(
            problem=self.problem.read_text(encoding="utf-8"),
            kernel=self.kernel.read_text(encoding="utf-8"),
            backend=self.backend,
            lane=lane,
            settings=settings,
            problem_label=self.problem.stem,
            kernel_label=self.name,
            batch="gallery",
            reuse=False,
        )


def _note(path: Path) -> str:
    return path.read_text(encoding="utf-8").partition('"""')[2].partition('"""')[0].strip().splitlines()[0]


def _entry(
    name: str, problem: str, kernel: str, backend: str, expected: Category, lanes: frozenset[str], settings: Settings
) -> Entry:
    problem_path, kernel_path = HERE / "problems" / f"{problem}.py", HERE / "kernels" / f"{kernel}.py"
    described = problem_path if expected.blame is Blame.PROBLEM else kernel_path
    return Entry(name, problem_path, kernel_path, backend, expected, lanes, settings, _note(described))


def _good(problem: str, backend: str, lanes: frozenset[str], precision: Precision = Precision.FP32) -> Entry:
    kernel = f"good/{backend}/{problem}"
    name = kernel if precision is Precision.FP32 else f"{kernel}-{precision}"
    return _entry(name, problem, kernel, backend, Category.PASSED, lanes, Settings(precision=precision))


def _bad(
    kernel: str, expected: Category, backend: str, lanes: frozenset[str], *, problem: str = "gelu", **settings: Any
) -> Entry:
    return _entry(f"bad/{kernel}", problem, f"bad/{kernel}", backend, expected, lanes, Settings(**settings))


def _faulty(problem: str, expected: Category, **settings: Any) -> Entry:
    return _entry(f"problem/{problem}", problem, "good/torch/gelu", "torch", expected, BOTH, Settings(**settings))


def _table() -> Iterator[Entry]:
    c = Category

    # ---- correct kernels ----------------------------------------------------------------------------
    yield _good("gelu", "torch", BOTH)
    yield _good("gelu", "triton", BOTH)
    yield _good("gelu", "triton", BOTH, Precision.FP16)
    yield _good("gelu", "cuda", GPU)
    yield _good("gelu", "cupy", GPU)
    yield _good("gelu", "cpp", CPU)
    yield _good("gelu", "tilelang", GPU)
    yield _good("gelu", "cute", GPU)
    yield _good("gelu", "cutile", GPU)
    yield _good("gelu", "numba", GPU)
    yield _good("gelu", "jax", GPU)
    yield _good("row_sum", "torch", BOTH)
    yield _good("row_sum", "triton", BOTH)
    yield _good("softmax", "torch", BOTH)
    yield _good("softmax", "triton", BOTH)
    yield _good("softmax", "cuda", GPU)
    yield _good("softmax", "cupy", GPU)
    yield _good("softmax", "cpp", CPU)
    yield _good("layer_norm", "torch", BOTH)
    yield _good("layer_norm", "triton", BOTH)
    yield _good("layer_norm", "cuda", GPU)
    yield _good("matmul", "torch", BOTH)
    yield _good("matmul", "triton", BOTH)
    yield _good("matmul", "triton", GPU, Precision.BF16)
    yield _good("matmul", "cuda", GPU)
    yield _good("linear_relu", "torch", BOTH)
    yield _good("linear_relu", "triton", BOTH)
    yield _good("linear_relu", "cuda", GPU)
    yield _good("conv2d", "torch", BOTH)
    yield _good("conv2d", "cuda", GPU)
    yield _good("attention", "torch", BOTH)
    yield _good("attention", "triton", BOTH)
    yield _good("mlp", "torch", BOTH)
    yield _good("mlp", "cpp", BOTH)
    yield _good("embedding_mean", "torch", BOTH)
    yield _good("embedding_mean", "triton", BOTH)
    yield _good("row_max", "torch", BOTH)
    yield _good("row_max", "triton", BOTH)
    yield _good("large_add_relu", "torch", GPU)
    yield _good("large_add_relu", "triton", GPU)
    yield _good("large_add_relu", "cuda", GPU)
    yield _good("tiny_values", "torch", BOTH)
    yield _good("scaled_silu", "torch", BOTH)

    # ---- refused before they run --------------------------------------------------------------------
    yield _bad("syntax_error", c.SYNTAX_ERROR, "torch", BOTH)
    yield _bad("missing_entry_point", c.ENTRY_POINT_MISSING, "torch", BOTH)
    yield _bad("entry_point_is_a_function", c.ENTRY_POINT_MISSING, "torch", BOTH)
    yield _bad("import_error", c.IMPORT_ERROR, "torch", BOTH)
    yield _bad("exception_at_import", c.IMPORT_ERROR, "torch", BOTH)
    yield _bad("cpp_type_mismatch", c.COMPILE_ERROR, "cpp", BOTH)
    yield _bad("nvcc_error", c.COMPILE_ERROR, "cuda", GPU)
    yield _bad("triton_compile_error", c.COMPILE_ERROR, "triton", GPU)
    yield _bad("cupy_compile_error", c.COMPILE_ERROR, "cupy", GPU)
    yield _bad("tilelang_compile_error", c.COMPILE_ERROR, "tilelang", GPU)
    yield _bad("cute_compile_error", c.COMPILE_ERROR, "cute", GPU)
    yield _bad("cutile_compile_error", c.COMPILE_ERROR, "cutile", GPU)
    yield _bad("numba_compile_error", c.COMPILE_ERROR, "numba", GPU)
    yield _bad("jax_compile_error", c.COMPILE_ERROR, "jax", GPU)
    yield _bad("compile_never_ends", c.COMPILE_TIMEOUT, "cpp", BOTH, deadlines=Deadlines(compile_s=3))

    # ---- fail while they run ------------------------------------------------------------------------
    yield _bad("init_error", c.INIT_ERROR, "torch", BOTH)
    yield _bad("wrong_constructor", c.INIT_ERROR, "torch", BOTH, problem="layer_norm")
    yield _bad("runtime_error", c.RUNTIME_ERROR, "torch", BOTH)
    yield _bad("wrong_forward_signature", c.RUNTIME_ERROR, "torch", BOTH, problem="matmul")
    yield _bad("runtime_error_triton", c.RUNTIME_ERROR, "triton", BOTH)
    yield _bad("illegal_memory_access_cuda", c.ILLEGAL_MEMORY_ACCESS, "cuda", GPU)
    yield _bad("illegal_memory_access_triton", c.ILLEGAL_MEMORY_ACCESS, "triton", GPU)
    yield _bad("illegal_memory_access_cupy", c.ILLEGAL_MEMORY_ACCESS, "cupy", GPU)
    yield _bad("misaligned_address", c.CUDA_ERROR, "cuda", GPU)
    yield _bad("trap", c.CUDA_ERROR, "cuda", GPU)
    yield _bad("index_out_of_range", c.CUDA_ERROR, "torch", GPU)
    yield _bad("too_much_shared_memory_cuda", c.LAUNCH_RESOURCES_EXCEEDED, "cuda", GPU)
    yield _bad("too_much_shared_memory_triton", c.LAUNCH_RESOURCES_EXCEEDED, "triton", GPU, problem="matmul")
    yield _bad("too_many_threads", c.LAUNCH_RESOURCES_EXCEEDED, "cuda", GPU)
    yield _bad("too_many_registers", c.LAUNCH_RESOURCES_EXCEEDED, "cuda", GPU)
    yield _bad("impossible_gpu_allocation", c.GPU_OUT_OF_MEMORY, "torch", GPU)
    yield _bad("gpu_memory_bomb", c.GPU_OUT_OF_MEMORY, "torch", GPU)
    yield _bad("impossible_host_allocation", c.HOST_OUT_OF_MEMORY, "torch", BOTH)
    # 3 GB, because a CUDA context alone takes over one.
    yield _bad("host_memory_bomb", c.HOST_OUT_OF_MEMORY, "torch", BOTH, limits=Limits(host_memory_bytes=3 << 30))
    yield _bad("segfault", c.CRASHED, "torch", BOTH)
    yield _bad("segfault_at_import", c.CRASHED, "torch", BOTH)
    yield _bad("abort", c.CRASHED, "torch", BOTH)
    yield _bad("exit_zero", c.CRASHED, "torch", BOTH)
    yield _bad("kill_itself", c.RUNTIME_ERROR, "torch", BOTH)
    yield _bad("endless_loop", c.TIMEOUT, "torch", BOTH, deadlines=Deadlines(check_s=2))
    yield _bad("endless_loop_at_import", c.TIMEOUT, "torch", BOTH, deadlines=Deadlines(load_s=2))
    yield _bad("endless_constructor", c.TIMEOUT, "torch", BOTH, deadlines=Deadlines(construct_s=2))
    yield _bad("endless_loop_cuda", c.TIMEOUT, "cuda", GPU, deadlines=Deadlines(check_s=3))
    yield _bad("endless_loop_triton", c.TIMEOUT, "triton", GPU, deadlines=Deadlines(check_s=5))
    yield _bad("output_flood", c.OUTPUT_LIMIT, "torch", BOTH)
    yield _bad("leftover_process", c.SANDBOX_VIOLATION, "torch", BOTH)

    # ---- run, and are wrong -------------------------------------------------------------------------
    yield _bad("wrong_output_structure", c.WRONG_OUTPUT_STRUCTURE, "torch", BOTH)
    yield _bad("returns_none", c.WRONG_OUTPUT_STRUCTURE, "torch", BOTH)
    yield _bad("missing_output", c.WRONG_OUTPUT_STRUCTURE, "torch", BOTH, problem="row_max")
    yield _bad("wrong_shape", c.WRONG_SHAPE, "torch", BOTH, problem="row_sum")
    yield _bad("wrong_dtype", c.WRONG_DTYPE, "torch", BOTH)
    yield _bad("wrong_index_dtype", c.WRONG_DTYPE, "torch", BOTH, problem="row_max")
    yield _bad("wrong_device", c.WRONG_DEVICE, "torch", BOTH)
    yield _bad("nan", c.NOT_FINITE, "torch", BOTH)
    yield _bad("infinity", c.NOT_FINITE, "torch", BOTH)
    yield _bad("wrong_values_torch", c.WRONG_VALUES, "torch", BOTH)
    yield _bad("wrong_values_triton", c.WRONG_VALUES, "triton", BOTH)
    yield _bad("wrong_values_cuda", c.WRONG_VALUES, "cuda", GPU)
    yield _bad("wrong_values_cupy", c.WRONG_VALUES, "cupy", GPU)
    yield _bad("wrong_values_cpp", c.WRONG_VALUES, "cpp", BOTH)
    yield _bad("wrong_values_tilelang", c.WRONG_VALUES, "tilelang", GPU)
    yield _bad("wrong_values_cute", c.WRONG_VALUES, "cute", GPU)
    yield _bad("wrong_values_cutile", c.WRONG_VALUES, "cutile", GPU)
    yield _bad("wrong_values_numba", c.WRONG_VALUES, "numba", GPU)
    yield _bad("wrong_values_jax", c.WRONG_VALUES, "jax", GPU)
    yield _bad("stale_answer", c.WRONG_VALUES, "torch", BOTH)
    yield _bad("zeros", c.WRONG_VALUES, "torch", BOTH, problem="tiny_values")
    yield _bad("wrong_gradient", c.WRONG_VALUES, "torch", BOTH, problem="scaled_silu")
    yield _bad("input_mutated", c.INPUT_MUTATED, "torch", BOTH)
    yield _bad("nondeterministic", c.NONDETERMINISTIC, "torch", BOTH)

    # ---- the problem is at fault: the kernel is correct ---------------------------------------------
    yield _faulty("broken_reference", c.REFERENCE_ERROR)
    yield _faulty("crashing_reference", c.REFERENCE_ERROR)
    yield _faulty("hanging_reference", c.REFERENCE_TIMEOUT, deadlines=Deadlines(reference_s=4))
    yield _faulty("no_model", c.INVALID_PROBLEM)
    yield _faulty("no_inputs", c.INVALID_PROBLEM)


def entries(lane: str | None = None) -> list[Entry]:
    """Return all entries, or those for ``lane`` (``cpu``, ``gpu`` or ``gpu.<model>``)."""
    kind = lane and lane.partition(".")[0]
    return [entry for entry in _table() if kind is None or kind in entry.lanes]


def categories_covered(lane: str | None = None) -> set[Category]:
    return {entry.expected for entry in entries(lane)}
