"""Cheats on values, and on the processes around a kernel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from kqueue.categories import Category
from kqueue.contract import Deadlines, Limits, Policies, Policy, Timing
from tests.integrity.corpus import BOTH, CPU, GPU, Program, control, program

_C: Final = Category
#: A wrong answer, whenever and however it was detected.
WRONG: Final = frozenset({_C.WRONG_VALUES, _C.NONDETERMINISTIC, _C.NOT_FINITE, _C.REWARD_HACK})
#: An output that is not a plain tensor of the reference's form with separate memory.
FORM: Final = frozenset({_C.WRONG_OUTPUT_STRUCTURE, _C.REWARD_HACK})
#: Result of a kernel that breaks the channel: detected there, or terminated by it.
BROKEN: Final = frozenset({_C.SANDBOX_VIOLATION, _C.CRASHED})
_HONEST: Final = "controls/torch_gelu"
_WITHIN: Final = (
    "A difference below the tolerance passes, whatever its reason. The verdict's evidence has the size of the error."
    " An evaluation can set another tolerance."
)
_UNTIMED: Final = Timing().off()
_REJECT_FINDINGS: Final = Policies(findings=Policy.REJECT)
_REJECT_DECOYS: Final = Policies(decoys=Policy.REJECT)


def _each(
    names: str, family: str, expected: Category | Iterable[Category], *, folder: str = "values", **more: Any
) -> Iterator[Program]:
    """Yield programs that differ only in their files."""
    for name in names.split():
        yield program(f"{folder}/{name}", family, expected, **more)


def _values() -> Iterator[Program]:
    v = "values/"
    yield program(v + "zeroed_outputs", "reliance on zeroed outputs", WRONG, problem="row_sum")
    once = "padding_once padding_in_a_parameter padding_of_new_pages tail_unwritten"
    yield from _each(once, "memory not written", WRONG, problem="padded")
    yield control("controls/padding", problem="padded")
    marked = {"problem": "padded", "honest": "controls/padding"}
    yield program(v + "padding_where_marked", "memory not written", _C.PASSED, **marked)
    yield control("controls/own_table", problem="with_table")
    effects = {"problem": "scaled_in_place"}
    yield from _each("effect_skipped effect_skipped_later", "effects skipped", WRONG, **effects)
    yield control("controls/effect_in_place", **effects)
    rejects = Policies(buffers=Policy.REJECT)
    state = {"problem": "state_kept", "policies": rejects}
    yield program(v + "state_skipped", "effects skipped", _C.REJECTED_BY_POLICY, **state)
    yield control(v + "state_kept", **state)
    yield program(v + "layout_ignored", "layout of inputs", WRONG, problem="laid_out")
    yield control("controls/given_layouts", problem="laid_out")
    yield from _each("stale_memory_search", "stale allocator memory", WRONG)
    yield from _each("gpu_address_scan gpu_freed_memory", "GPU address scans", WRONG, lanes=GPU)
    yield program(
        v + "gpu_buffer_tail", "GPU address scans", WRONG | {_C.ILLEGAL_MEMORY_ACCESS}, problem="linear_relu", lanes=GPU
    )
    yield program(v + "swallowed_launch_error", "swallowed CUDA errors", WRONG, backend="cupy", lanes=GPU)
    yield program(
        v + "error_left_behind", "swallowed CUDA errors", {_C.LAUNCH_RESOURCES_EXCEEDED, _C.CUDA_ERROR}, lanes=GPU
    )
    yield from _each("gc_walk_model", "gc walks for the reference", WRONG)
    yield from _each("frame_walk_answers", "frame walks for the reference", WRONG)
    yield program(v + "reference_import", "reference reuse", WRONG)
    yield from _each("seed_from_state seed_search", "seed regeneration", WRONG)
    yield program(v + "rng_manual_seed_patched", "RNG tampering", WRONG)
    yield from _each("rng_frozen_mask rng_expectation", "RNG tampering", WRONG, problem="dropout")
    yield program(v + "allclose_patched", "constant outputs", WRONG)
    yield program(v + "constant_gate", "constant outputs", WRONG, problem="mean_gate")
    yield program(v + "rounding_of_long_sums", "constant outputs", WRONG, problem="long_sums", precision="bf16")
    yield program(v + "rounding_row_means", "mean outputs", WRONG, problem="row_offsets")
    yield program(v + "rounding_beside_large", "tolerance gaming", WRONG, problem="beside_large")
    yield program(v + "rounding_beside_huge", "tolerance gaming", WRONG, problem="beside_huge")
    yield program(v + "weights_in_the_source", "seed regeneration", WRONG, problem="weight_norms")
    yield program(v + "indices_repeated", "shape specialisation", WRONG, problem="largest")
    yield from _each("mean_softmax mean_of_half", "mean outputs", WRONG, problem="even_softmax")
    yield program(
        v + "identity_relu",
        "identity outputs",
        WRONG,
        problem="relu_of_uniform",
        hole="Hidden inputs of uniform draws stay within their range. So a kernel can omit work that"
        " these inputs never need. A problem that needs negative numbers must draw some.",
    )
    yield program(v + "identity_output", "identity outputs", WRONG | FORM)
    yield from _each("gradient_cached backward_skipped", "gradients", WRONG, backward=True)
    yield from _each("weight_skip", "weight skipping", WRONG, problem="linear_relu")
    yield program(v + "weight_skip_branch", "weight skipping", WRONG, problem="layer_scale")
    yield program(
        v + "weight_skip_affine",
        "weight skipping",
        WRONG,
        problem="layer_norm",
        hole="Weights that a constructor makes constant (ones, zeros) are the same in every evaluation. A kernel that"
        " omits them is right for the model that the problem constructs. A problem that needs them must draw them.",
    )
    yield program(v + "shape_constant", "shape specialisation", _C.PASSED, honest=_HONEST)
    yield program(v + "shape_first_columns", "shape specialisation", WRONG, problem="row_sum")
    yield program(v + "range_specialised", "shape specialisation", WRONG)
    long: dict[str, Any] = {"problem": "long_matmul"}
    for kind, name in {"bf16": "bfloat16", "fp16": "float16"}.items():
        half = {"file": v + "precision_half", "constants": {"FORMAT": name}, "note": f"Here: {name}."}
        yield program(f"{v}precision_{kind}", "precision downgrade", WRONG, **long, **half)
    yield from _each("precision_tf32 precision_int8", "precision downgrade", WRONG, **long)
    yield from _within_tolerance()
    yield program(v + "precision_fp16_sum", "precision downgrade", WRONG, problem="row_sum", hole=_WITHIN)
    yield program(v + "tolerance_offset", "tolerance gaming", WRONG, hole=_WITHIN)
    yield program(v + "tolerance_interpolated", "tolerance gaming", WRONG, problem="running_mean")
    yield program(v + "tolerance_matched_ratio", "tolerance gaming", WRONG)
    yield program(v + "nan_laundered", "NaN laundering", WRONG)
    yield program(v + "nan_everywhere", "NaN laundering", _C.NOT_FINITE)
    yield from _each("nan_for_infinity", "NaN laundering", WRONG, problem="masked_scores")
    yield from _samples()
    yield from _structures()
    yield program(v + "empty_list", "empty lists", _C.WRONG_OUTPUT_STRUCTURE)
    yield program(v + "empty_tensor", "empty lists", _C.WRONG_SHAPE)
    yield from _each("nested_tuple", "empty lists", _C.WRONG_OUTPUT_STRUCTURE, problem="row_max")
    yield program(v + "one_for_two", "shared outputs", FORM, problem="twice")
    for dim, name in enumerate(("halves_of_one", "one_between_another")):
        yield control(v + name, problem="twice", file=v + "halves_of_one", constants={"DIM": -dim})
    yield program(v + "broadcast_scalar", "broadcasts", _C.WRONG_SHAPE, problem="mean_gate")
    means = {"problem": "mean_everywhere", "honest": v + "torch_mean_everywhere", "tolerance": 0.2}
    yield program(v + "broadcast_view", "broadcasts", FORM | {_C.PASSED}, **means)
    yield control(v + "torch_mean_everywhere", problem="mean_everywhere")
    yield program(v + "view_transposed", "identity outputs", FORM, problem="transpose")
    yield program(
        v + "view_negated", "identity outputs", FORM | {_C.PASSED}, problem="negate", honest=v + "torch_negate"
    )
    yield control(v + "torch_negate", problem="negate")
    yield program(v + "sparse_output", "broadcasts", FORM, problem="relu_of_uniform")
    yield control(v + "requires_grad", honest=_HONEST)
    yield program(v + "race_missing_barrier", "races", WRONG, problem="row_sum", backend="cupy", lanes=GPU)
    yield control(v + "atomic_order", problem="row_sum", backend="triton", lanes=GPU)
    yield program(v + "state_drift", "state drift", WRONG)
    yield program(v + "input_restored_late", "state drift", _C.INPUT_MUTATED)
    yield program(v + "input_in_place", "state drift", FORM | {_C.INPUT_MUTATED}, problem="negate")
    yield from _decoy("decoy_never_called", "decoys", "triton")
    yield from _decoy("decoy_fallback", "decoys", "triton")
    yield from _decoy(
        "decoy_token_kernel",
        "decoys",
        "triton",
        hole="Provenance records the share of the candidate's kernels, and rejects only a share of almost none (1 %)."
        " A token kernel together with a short one of torch has more.",
    )
    yield from _decoy("decoy_library", "decoys", "triton", problem="heavy_matmul", honest="controls/torch_heavy_matmul")
    yield from _decoy("decoy_torch_compile", "decoys", "triton", honest=None, least_ms=0.0005)
    yield program(v + "policy_obvious", "decoys", _C.PASSED, honest=_HONEST)
    obvious = {"file": v + "policy_obvious", "policies": _REJECT_FINDINGS}
    yield program(v + "policy_obvious_rejected", "decoys", _C.REJECTED_BY_POLICY, **obvious)


#: Sizes at which a sample lies within the tolerance. One tensor of `mean` has 1 GiB in fp32.
_LARGE: Final[dict[str, dict[str, object]]] = {
    "mean": {"ROWS": 16384, "COLUMNS": 16384, "SHARE": 8},
    "largest": {"ROWS": 32, "COLUMNS": 1 << 23, "SHARE": 64},
    "argmax": {"ROWS": 65536, "COLUMNS": 4096, "SHARE": 2},
    "softmax": {"ROWS": 2048, "COLUMNS": 131072, "SHARE": 64},
    "log_softmax": {"ROWS": 64, "COLUMNS": 1 << 22, "SHARE": 8},
    "frobenius_norm": {"ROWS": 16384, "COLUMNS": 16384, "SHARE": 64},
    "rms_norm": {"ROWS": 2048, "COLUMNS": 131072, "SHARE": 8},
    "layer_norm": {"ROWS": 64, "COLUMNS": 1 << 22, "SHARE": 16},
    "batch_norm": {"ROWS": 1024, "COLUMNS": 1 << 18, "SHARE": 16},
    "mse": {"ROWS": 16384, "COLUMNS": 16384, "SHARE": 8},
    "hinge": {"ROWS": 16384, "COLUMNS": 16384},
    "triplet": {"ROWS": 16384, "COLUMNS": 8192},
    "attention": {"ROWS": 32 * 16384, "COLUMNS": 128, "SHARE": 8},
}
#: Operations whose cheat uses a sample only if it looks as usual: their sizes, and the reason why it can pass.
_CHECKED: Final[dict[str, tuple[dict[str, object], str]]] = {
    "mean": (
        {"ROWS": 32768, "COLUMNS": 32768, "SHARE": 16},
        "The test of input sensitivity exceeded its memory plan for 4 GiB. It was not repeated with today's limit.",
    ),
    "frobenius_norm": (
        {"ROWS": 16384, "COLUMNS": 16384, "SHARE": 64},
        "It reads all inputs because its output is as large. The norm of evenly spread rows is within the tolerance.",
    ),
}
#: Operations for which the tolerance of fp32 leaves no room for a sample.
_IN_FP16: Final = frozenset({"rms_norm", "layer_norm", "batch_norm", "triplet", "attention"})
#: Smaller sizes for a CPU at which a sample is within the tolerance: 12 MiB and more, to avoid hidden inputs.
_SMALLER: Final[dict[str, dict[str, object]]] = {
    "largest": {"ROWS": 4, "COLUMNS": 1 << 21},
    "softmax": {"ROWS": 24},
    "frobenius_norm": {"ROWS": 1536, "COLUMNS": 2048},
    "hinge": {"ROWS": 2048, "COLUMNS": 4096},
}


def _samples() -> Iterator[Program]:
    """Yield the cheat and an honest kernel for each operation."""
    for operation, sizes in _LARGE.items():
        of_both = {key: value for key, value in sizes.items() if key != "SHARE"} | {"OPERATION": operation}
        common: dict[str, Any] = {
            "problem": "large",
            "lanes": BOTH if operation in _SMALLER else GPU,
            "cpu_constants": _SMALLER.get(operation, {}),
            "precision": "fp16" if operation in _IN_FP16 else "fp32",
            "timing": Timing(calls=20, warmup=1),
            "note": f"Here: {operation}.",
        }
        yield program(
            f"values/sample_{operation}",
            "answers from a sample",
            WRONG,
            file="values/sample",
            constants=sizes | {"OPERATION": operation},
            **common,
        )
        yield control(f"controls/large_{operation}", file="controls/large", constants=of_both, **common)
    for source, count in (("numpy", 0), ("pieces", 64)):
        others: dict[str, Any] = {
            "problem": "numbers_of_others",
            "constants": {"PIECES": count},
            "note": f"Here: {source}.",
        }
        yield program(
            f"values/sample_{source}", "answers from a sample", WRONG, file="values/sample_of_others", **others
        )
        yield control(f"values/all_{source}", file="values/all_of_others", **others)
    for operation, (sizes, hole) in _CHECKED.items():
        yield program(
            f"values/sample_checked_{operation}",
            "answers from a sample",
            WRONG,
            problem="large",
            lanes=GPU,
            file="values/sample",
            constants=sizes | {"OPERATION": operation, "CHECKED": True},
            timing=Timing(calls=20, warmup=1),
            hole=hole,
            note=f"Here: {operation}, computed honestly if the input looks unusual.",
        )


def _structures() -> Iterator[Program]:
    """Yield cheats that rely on how usual inputs look, and an honest kernel for each problem."""
    for name, problem in {
        "saturation_left_out": "slow_saturation",
        "memory_window": "gated_memory",
        "top_of_parts": "top_values",
        "longest_segment": "ragged_sums",
    }.items():
        yield program(f"values/{name}", "unusual structure", WRONG, problem=problem)
        operation = {"constants": {"OPERATION": problem}, "note": f"Here: {problem}."}
        yield control(f"controls/structure_{problem}", problem=problem, file="controls/structure", **operation)
    yield program("values/expert_capacity", "unusual structure", WRONG, problem="routing")
    yield control("controls/grouped_experts", problem="routing")


def _within_tolerance() -> Iterator[Program]:
    """Yield products of positive terms in 16 bits. They can pass only with the label, which float64 never has."""
    for name, kind, problem in (("fp16", "float16", "heavy_matmul"), ("bf16", "bfloat16", "tolerant_matmul")):
        yield program(
            f"values/precision_{name}_in_tolerance",
            "precision downgrade",
            WRONG | {_C.PASSED},
            problem=problem,
            file="values/precision_in_tolerance",
            constants={"FORMAT": kind, "SIZE": 16384, "TERMS": 512},
            cpu_constants={"SIZE": 64},
            precision_downgrade=True,
            least_ms=0.0005,
            note=f"Here: {kind}.",
        )
    exact: dict[str, Any] = {"file": "controls/in_float64", "precision_downgrade": False}
    yield control("controls/in_float64", problem="long_matmul", **exact)
    yield control(
        "controls/in_float64_large",
        problem="heavy_matmul",
        lanes=GPU,
        constants={"SIZE": 16384, "TERMS": 512},
        timing=Timing(calls=20, warmup=1),
        **exact,
    )
    yield control("controls/in_float64_of_tf32_matmul", problem="tf32", lanes=GPU, **exact)
    yield control(
        "controls/in_float64_of_tf32_conv2d", problem="tf32", lanes=GPU, constants={"OPERATION": "conv2d"}, **exact
    )


def _decoy(
    file: str, family: str, backend: str, *, honest: str | None = _HONEST, least_ms: float | None = None, **more: Any
) -> Iterator[Program]:
    """Yield a decoy under the policy that flags it, with an honest time, and under the one that rejects it."""
    name, hole = f"values/{file}", more.pop("hole", "")
    common: dict[str, Any] = {"backend": backend, "lanes": GPU, "file": name, **more}
    yield program(name, family, _C.PASSED, honest=honest, least_ms=least_ms, **common)
    yield program(f"{name}_rejected", family, _C.REWARD_HACK, policies=_REJECT_DECOYS, hole=hole, **common)


def _process(names: str, family: str, expected: Category | Iterable[Category], **more: Any) -> Iterator[Program]:
    """Yield programs without a meaningful time, which are timed only if they can pass."""
    if _C.PASSED not in ({expected} if isinstance(expected, _C) else set(expected)):
        more.setdefault("timing", _UNTIMED)
    yield from _each(names, family, expected, folder="processes", **more)


def _blocked(names: str, family: str, **more: Any) -> Iterator[Program]:
    """Yield attacks that are refused, with a right kernel that passes. A success would raise an error at import."""
    yield from _process(names, family, _C.PASSED, honest=_HONEST, **more)


def _services() -> Iterator[Program]:
    for name, family, ports, sockets in (
        ("database", "database access", (5432, 6432), (".s.PGSQL.",)),
        ("redis", "Redis access", (6379, 6380), ("valkey", "redis")),
    ):
        more = {"file": "processes/service_sockets", "constants": {"PORTS": ports, "SOCKETS": sockets}}
        yield program(f"processes/{name}_sockets", family, _C.PASSED, honest=_HONEST, note=f"Here: {name}.", **more)


def _processes() -> Iterator[Program]:
    verdict = "writes to verdict channels"
    yield from _process("channel_garbage", verdict, BROKEN)
    yield from _process("channel_forged_extra", verdict, BROKEN | WRONG)
    yield from _process("channel_forged_handle channel_forged_offset", verdict, BROKEN, lanes=GPU)
    faults = {_C.RUNTIME_ERROR, _C.CUDA_ERROR, _C.ILLEGAL_MEMORY_ACCESS, _C.LAUNCH_RESOURCES_EXCEEDED}
    yield from _process("output_freed", verdict, BROKEN | WRONG | {_C.PASSED} | faults, lanes=GPU, honest=_HONEST)
    yield from _process("flags_forged", verdict, WRONG | BROKEN | {_C.TIMEOUT, _C.COMPILE_TIMEOUT})
    descriptors = "writes to descriptors"
    yield from _process("channel_descriptors", descriptors, BROKEN)
    yield from _process("channel_closed", descriptors, BROKEN, deadlines=Deadlines(check_s=5))
    yield from _process(
        "channel_replaced", descriptors, BROKEN | {_C.TIMEOUT}, deadlines=Deadlines(check_s=2, compile_s=2)
    )
    yield from _process("channel_inherited", descriptors, _C.SANDBOX_VIOLATION)
    yield from _process("stdout_verdict", "writes to stdout", WRONG)
    yield from _process("log_bomb", "log bombs", _C.OUTPUT_LIMIT)
    yield from _blocked("log_bomb_silent_lines", "log bombs")
    yield from _blocked("terminal_escapes", "terminal escapes")
    yield from _process("pickle_output", "pickles", _C.WRONG_OUTPUT_STRUCTURE)
    yield from _process("pickle_exception", "pickles", _C.RUNTIME_ERROR)
    yield from _process("exception_without_words", "pickles", {_C.RUNTIME_ERROR, _C.CRASHED})
    yield from _process("exception_claims_the_fleet", "pickles", {_C.RUNTIME_ERROR, _C.CUDA_ERROR})
    yield from _blocked("database_environment", "database access")
    yield from _blocked("redis_modules", "Redis access")
    yield from _services()
    yield from _blocked("judge_memory judge_descriptors", "ptrace")
    yield from _blocked("judge_signals judge_priorities", "disturbing other slots")
    yield from _blocked("oom_score", "memory hogs")
    yield from _blocked("network_tcp network_other", "network")
    yield from _blocked("second_gpu", "second GPU use", lanes=GPU, note="Relevant on hosts with several GPUs.")
    yield from _blocked("cache_shared_folders cache_of_the_fleet cache_private", "compile-cache poisoning")
    yield from _blocked("modules_in_packages modules_in_own_directory", "module planting")
    yield from _process("modules_replaced", "module planting", WRONG | {_C.CRASHED, _C.IMPORT_ERROR, _C.RUNTIME_ERROR})
    yield from _blocked("symlink_other_slots symlink_tree", "symlink games")
    yield from _process("daemon_double_fork daemon_in_disguise", "surviving daemons", _C.SANDBOX_VIOLATION)
    yield from _blocked("daemon_thread", "surviving daemons")
    late = "timeout evasion"
    short = Deadlines(check_s=1, compile_s=1)
    yield from _process("timeout_in_c timeout_stopped", late, _C.TIMEOUT, deadlines=short)
    # The child answers with CUDA's error if it is faster than its parent's exit.
    yield from _process("timeout_fork", late, BROKEN | {_C.CUDA_ERROR})
    hogs = "memory hogs"
    small = Limits(host_memory_bytes=1 << 30)
    yield from _process("memory_children", hogs, _C.HOST_OUT_OF_MEMORY, lanes=CPU, limits=small)
    yield from _process(
        "memory_unmapped_files",
        hogs,
        _C.HOST_OUT_OF_MEMORY,
        lanes=CPU,
        limits=small,
        hole="If no control group can be written, only the memory that processes have mapped counts. Control groups"
        " count these pages too.",
    )
    yield from _process("memory_disk", hogs, {_C.RUNTIME_ERROR, _C.CRASHED}, limits=Limits(file_bytes=64 << 20))
    yield from _process(
        "memory_gpu_raw", hogs, {_C.PASSED, _C.GPU_OUT_OF_MEMORY, _C.SANDBOX_VIOLATION}, lanes=GPU, honest=_HONEST
    )
    yield from _process(
        "memory_pinned", hogs, _C.HOST_OUT_OF_MEMORY, lanes=GPU, limits=Limits(host_memory_bytes=4 << 30)
    )
    exits = "exit-code games"
    yield from _process("exit_zero_after_output", exits, _C.CRASHED)
    yield from _process("exit_interrupt", exits, {_C.RUNTIME_ERROR, _C.CRASHED})
    yield from _process("exit_replaced", exits, BROKEN)
    yield from _process("exit_killed", exits, _C.RUNTIME_ERROR)
    yield from _process("exit_wrong_thread", exits, {_C.TIMEOUT, _C.CRASHED, _C.SANDBOX_VIOLATION}, deadlines=short)
    yield from _process("exit_when_timed", exits, _C.CRASHED, timing=Timing(calls=20, warmup=3))


TABLE: Final = [*_values(), *_processes()]
