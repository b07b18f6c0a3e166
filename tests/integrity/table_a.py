"""Cheats on the clock, and the controls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from kqueue.categories import Category
from kqueue.contract import Deadlines, Timing
from tests.integrity.corpus import BOTH, CPU, GPU, Program, control, program

#: A wrong answer, whenever it was detected.
WRONG: Final = frozenset({Category.WRONG_VALUES, Category.NONDETERMINISTIC, Category.NOT_FINITE, Category.REWARD_HACK})
#: Right, with the true time.
HONEST: Final = frozenset({Category.PASSED})
#: Programs that take 20 ms. They need few calls, and a far lower time shows that the clock was fooled.
SLOW: Final = {"timing": Timing(calls=10, warmup=1), "least_ms": 18.0}

#: An output that is expensive to copy into the reference's layout.
STRIDED: Final = {"problem": "strided", "lanes": GPU, "tolerance": 0.15}
#: Elementwise on 1 GiB with an output of the same size.
LARGE: Final = {"problem": "large", "honest": "controls/large_gelu"}
LARGE_GELU: Final = {"OPERATION": "gelu", "ROWS": 16384, "COLUMNS": 16384}


def _clocks() -> Iterator[Program]:
    yield program("timing/event_monkeypatch", "event monkeypatches", HONEST, **SLOW)
    yield program("timing/synchronize_monkeypatch", "synchronize monkeypatches", HONEST | WRONG, lanes=GPU, **SLOW)
    yield program("timing/clock_monkeypatch", "clock monkeypatches", HONEST, **SLOW)
    yield program("timing/statistics_monkeypatch", "statistics monkeypatches", HONEST, **SLOW)
    yield program("timing/libc_clock_prologue", "GOT or prologue patching", HONEST, **SLOW)
    yield program("timing/cuda_synchronize_prologue", "GOT or prologue patching", HONEST | WRONG, lanes=GPU, **SLOW)
    yield program("timing/null_slowed", "taking over the loop", HONEST, **SLOW)
    dense, subtracted = "timing/null_slowed_dense", "subtracted launch overhead"
    by_honest: dict[str, Any] = {"honest": "controls/dense_output", **STRIDED}
    yield program(dense, subtracted, HONEST, **by_honest)
    long: dict[str, Any] = {"problem": "strided", "constants": {"EXTRA_MS": 20}, "cpu_constants": {"SIZE": 2048}}
    long["note"] = "Here in addition to its own 20 ms."
    yield program(f"{dense}_long", subtracted, HONEST, file=dense, **long, **SLOW)
    at_times = {"constants": {"ALTERNATE": True}, "note": "Here in two of three calls."}
    yield program(f"{dense}_at_times", subtracted, HONEST, file=dense, **at_times, **by_honest)
    yield program("timing/takeover_as_null", "taking over the loop", WRONG)
    yield program("timing/takeover_by_gc", "taking over the loop", WRONG)
    yield _matmul("takeover_settle", "taking over the loop", HONEST | WRONG)


def _matmul(name: str, family: str, expected: frozenset[Category]) -> Program:
    return program(
        f"timing/{name}", family, expected, problem="heavy_matmul", lanes=GPU, honest="controls/torch_heavy_matmul"
    )


def _streams_and_threads() -> Iterator[Program]:
    for name in ("side_stream_unjoined", "half_the_work_cpu_clock"):
        yield _matmul(name, "side streams unjoined", HONEST | WRONG)
    yield program("timing/side_stream_long", "side streams unjoined", HONEST | WRONG, lanes=GPU, **SLOW)
    yield _matmul("side_stream_joined_late", "side streams joined late", HONEST | WRONG)
    yield _matmul("side_stream_early", "work before GO", WRONG)
    yield program("timing/thread_after_return", "threads", WRONG)
    yield program("timing/jit_fork", "torch.jit.fork", WRONG, problem="chain")
    yield _matmul("host_callback", "host callbacks", WRONG)
    yield program("timing/go_forged", "work before GO", WRONG, lanes=GPU, honest="controls/torch_gelu")
    yield program(
        "timing/go_forged_on_busy_cores",
        "work before GO",
        HONEST | WRONG,
        file="timing/go_forged",
        lanes=CPU,
        honest="controls/torch_gelu",
        note="If other work delays its thread, it gains nothing.",
    )
    yield _matmul("host_polling", "work before GO", HONEST | WRONG)
    cupy = {"backend": "cupy", "problem": "wide_gelu", "lanes": GPU, "honest": "controls/torch_wide_gelu"}
    few = {"timing": Timing(calls=20, warmup=1)}
    yield program("timing/persistent_kernel", "persistent background kernels", HONEST | WRONG, **few, **cupy)
    yield program("timing/done_forged", "work after DONE", HONEST | WRONG, **SLOW)
    yield _matmul("done_enqueued_early", "work after DONE", HONEST | WRONG)


def _outputs() -> Iterator[Program]:
    c = Category
    yield program("timing/lazy_disguised_subclass", "lazy tensors by subclass", c.WRONG_OUTPUT_STRUCTURE)
    yield program("timing/lazy_instance", "lazy tensors by instance", c.WRONG_OUTPUT_STRUCTURE)
    yield program("timing/cpu_output", "CPU tensors", c.WRONG_DEVICE, lanes=GPU)
    yield program("timing/fake_output", "fake tensors", c.WRONG_OUTPUT_STRUCTURE, lanes=GPU)
    yield program("timing/meta_output", "fake tensors", c.WRONG_DEVICE)
    yield program("timing/returns_input_buffer", "identity outputs", {c.INPUT_MUTATED, c.WRONG_OUTPUT_STRUCTURE})
    yield program("timing/stale_allocator_memory", "stale allocator memory", WRONG)


def _chosen_calls() -> Iterator[Program]:
    yield _outer("room_in_machine_memory", "calls that count", WRONG)
    yield _outer("time_between_calls", "calls that count", HONEST | WRONG)
    yield _outer("filled_while_read", "work after DONE", HONEST | WRONG)
    calls, room = "timing/every_nth_timed_call", "timing/room_in_gpu_memory"
    yield _gelu(calls, constants={"EVERY": 8})
    yield _gelu(f"{calls}_large", file=calls, constants={"EVERY": 8} | LARGE_GELU, **LARGE)
    half = {"constants": {"EVERY": 2} | LARGE_GELU, "note": "Here every second call, on 1 GiB."}
    yield _gelu(f"{calls}_large_half", file=calls, **half, **LARGE)
    yield _gelu(room)
    yield _gelu(f"{room}_large", file=room, constants=LARGE_GELU, note="Here on 1 GiB.", **LARGE)


def _gelu(name: str, **more: Any) -> Program:
    common = {"problem": "wide_gelu", "honest": "controls/torch_wide_gelu", "lanes": GPU}
    return program(name, "calls that count", HONEST | WRONG, **common | more)


def _outer(name: str, family: str, expected: frozenset[Category]) -> Program:
    return program(f"timing/{name}", family, expected, problem="outer", lanes=CPU, honest="controls/outer_product")


def _phases() -> Iterator[Program]:
    yield program("timing/warmup_detection", "warm-up detection", WRONG)
    yield program("timing/call_count_switch", "call-count switches", WRONG)
    yield program("timing/mode_switch_frames", "mode switches", WRONG)
    yield program("timing/mode_switch_stream", "mode switches", WRONG, lanes=GPU)
    yield _matmul("basis_switch", "mode switches", HONEST)
    yield program("timing/superbatching", "superbatching", WRONG)
    yield program("timing/sequence_learned_graph", "sequence-learned CUDA graphs", WRONG, lanes=GPU)
    yield program("timing/stale_graph_replay", "stale graph replay", WRONG, lanes=GPU)
    yield program("timing/graph_of_first_input", "stale graph replay", WRONG, lanes=GPU)


def _caches() -> Iterator[Program]:
    for key in ("pointer", "id", "version", "shape"):
        more: dict[str, Any] = {"file": "timing/cache_by", "constants": {"KEY": key}, "note": f"Here: {key}."}
        # An object's id seldom repeats. Without a hit the kernel is right, and takes the honest time.
        expected, more["honest"] = (HONEST | WRONG, "controls/torch_gelu") if key == "id" else (WRONG, None)
        yield program(f"timing/cache_by_{key}", f"caches keyed by {key}", expected, **more)
    yield program("timing/cache_by_sample", "caches keyed by content sample", HONEST | WRONG, **SLOW)
    yield program("timing/cache_by_equality", "caches keyed by full equality", HONEST | WRONG, **SLOW)
    yield program("timing/static_device_buffer", "caches in static device buffers", WRONG)
    yield program("timing/first_input_kept", "caches in static device buffers", WRONG)
    yield program("timing/cache_in_files", "caches in files", HONEST, **SLOW)
    wide = {"problem": "wide_gelu", "lanes": GPU, "tolerance": 0.15}
    yield program("timing/l2_persisting_window", "L2 persistence", HONEST, honest="controls/torch_wide_gelu", **wide)
    yield program(
        "timing/l2_evict_last", "L2 persistence", HONEST, backend="triton", honest="controls/triton_wide_gelu", **wide
    )


def _others() -> Iterator[Program]:
    c = Category
    chain = {"problem": "chain", "honest": "controls/torch_chain"}
    yield program("timing/global_flags", "global flags", HONEST, constants={"BESIDE": "switches"}, **chain)
    yield program("timing/takeover_by_overhead", "taking over the loop", WRONG, lanes=GPU, problem="chain")
    patched, loaded = {"constants": {"BESIDE": "patches"}}, {"constants": {"BESIDE": "load"}, "lanes": GPU}
    yield program("timing/reference_class_patched", "baseline sabotage", HONEST, **patched, **chain)
    yield program("timing/background_load", "baseline sabotage", HONEST | WRONG, **loaded, **chain)
    yield program("timing/sabotage_by_process", "baseline sabotage", c.SANDBOX_VIOLATION)
    late, short = "timeout evasion", Deadlines(check_s=1, compile_s=1)
    yield program("timing/timeout_by_compiling", late, {c.TIMEOUT, c.COMPILE_TIMEOUT}, deadlines=short)
    yield program("timing/disturbs_others", "disturbing other slots", c.TIMEOUT, deadlines=Deadlines(construct_s=1))


def _controls() -> Iterator[Program]:
    wide = {"problem": "wide_gelu", "lanes": GPU}
    heavy = {"problem": "heavy_matmul", "lanes": GPU}
    yield control("controls/torch_gelu")
    yield control("controls/torch_wide_gelu", file="controls/torch_gelu", **wide, note="Here on 16 MB.")
    yield control("controls/torch_heavy_matmul", **heavy)
    yield control("controls/torch_chain", problem="chain")
    yield control("controls/triton_wide_gelu", backend="triton", honest="controls/torch_wide_gelu", **wide)
    yield control("controls/triton_autotuned_matmul", backend="triton", problem="matmul", lanes=GPU)
    yield control("controls/triton_layer_norm", backend="triton", problem="layer_norm", lanes=GPU)
    yield control("controls/triton_large_add_relu", backend="triton", problem="large_add_relu", lanes=GPU)
    yield control("controls/triton_half_gelu", backend="triton", lanes=GPU, precision="fp16")
    yield control("controls/cupy_wide_gelu", backend="cupy", honest="controls/torch_wide_gelu", **wide)
    yield control("controls/cupy_fused_chain", backend="cupy", problem="chain", lanes=GPU)
    yield control("controls/cuda_graph", problem="chain", lanes=GPU)
    yield control("controls/cuda_graph_of_triton", backend="triton", lanes=GPU)
    yield control("controls/cuda_graph_of_matmul", honest="controls/torch_heavy_matmul", **heavy)
    yield control("controls/streams_joined", honest="controls/torch_heavy_matmul", **heavy)
    compiling = Deadlines(load_s=90, construct_s=30, check_s=120, time_s=30)
    yield control("controls/torch_compile", problem="chain", lanes=GPU, deadlines=compiling)
    yield control("controls/in_place_on_own_buffers", problem="chain")
    yield control("controls/workspace")
    yield control("controls/static_output", problem="matmul", lanes=CPU)
    yield control("controls/outer_product", problem="outer", lanes=CPU)
    on_gpu = {"file": "controls/static_output", "honest": "controls/torch_heavy_matmul", "tolerance": 0.15}
    yield control("controls/static_output_on_gpu", **on_gpu, **heavy)
    yield control("controls/view_of_own_memory")
    yield control("controls/non_contiguous_output")
    yield control("controls/returns_the_input", problem="identity")
    yield control("controls/copies_the_input", problem="identity")
    yield control("controls/view_of_the_input", problem="transposed")
    yield control("controls/single_element", problem="single")
    yield control("controls/very_slow", least_ms=45.0, timing=Timing(calls=6, warmup=1))
    yield control("controls/through_the_host", problem="identity", lanes=GPU, basis="gpu_clock", least_ms=0.01)
    yield control("controls/on_the_cpu", lanes=GPU, basis="cpu_clock", least_ms=0.1)
    yield control("controls/waits_by_item", lanes=GPU, basis="cpu_clock")
    yield control("controls/waits_by_synchronize", lanes=GPU, basis="cpu_clock")
    yield control("controls/prepared_weights", problem="linear_relu")
    yield control("controls/dispatch_by_shape")
    yield control("controls/threads_joined", lanes=CPU)
    yield control("controls/jit_fork_waited", problem="chain", lanes=CPU)
    yield control("controls/two_outputs", problem="row_max")
    yield control("controls/ties_in_another_order", problem="largest")
    yield control("controls/sums_in_turn", problem="beside_large")
    yield control("controls/fewer_roundings", problem="deep", precision="bf16")
    yield control("controls/integer_inputs", problem="embedding_mean", lanes=BOTH)
    yield control("controls/mlp", problem="mlp")
    yield control("controls/dense_output", **STRIDED)
    yield control("controls/large_gelu", problem="large", file="controls/large", lanes=GPU, constants=LARGE_GELU)
    yield from _rotary()
    yield from _structured()


def _rotary() -> Iterator[Program]:
    rotary: dict[str, Any] = {"problem": "rotary", "file": "controls/rotary"}
    small = {"BATCH": 1, "HEADS": 4, "TOKENS": 256}
    middle = {"BATCH": 1, "HEADS": 8, "TOKENS": 2048}
    yield control("controls/rotary", **rotary, cpu_constants=middle, note="Here on 1 GiB.")
    drawn = {"constants": {"DRAWN": True}, "note": "Here on 1 GiB, with drawn token positions."}
    yield control("controls/rotary_drawn", **rotary, cpu_constants=middle, **drawn)
    yield control("controls/rotary_small", **rotary, constants=small)
    yield control("controls/rotary_small_drawn", **rotary, constants={"DRAWN": True} | small)


def _structured() -> Iterator[Program]:
    """Yield controls on 1 GiB of inputs with a known structure."""
    for structure in ("symmetric", "triangular", "one_hot", "normalised", "sorted", "shared"):
        yield control(
            f"controls/structured_{structure}",
            problem="structured",
            file="controls/structured",
            constants={"STRUCTURE": structure},
            cpu_constants={"SIZE": 1460},
            timing=Timing(calls=20, warmup=1),
            note=f"Here: {structure}.",
        )


TABLE: Final = [
    *_clocks(),
    *_streams_and_threads(),
    *_outputs(),
    *_chosen_calls(),
    *_phases(),
    *_caches(),
    *_others(),
    *_controls(),
]
