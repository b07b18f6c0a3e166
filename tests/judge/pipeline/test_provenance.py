"""Authors of the GPU work, by kernel names recorded on an H200 (torch 2.11, Triton 3.6, CuPy, CUDA 13)."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kqueue.categories import Category
from kqueue.contract import Phase, Policy
from kqueue.evidence import LibraryKernel, Provenance
from workers.judge.channel import activities
from workers.judge.ending import EvaluationEnded
from workers.judge.pipeline import provenance

EXAMPLES = Path(__file__).parents[3] / "examples" / "kernels" / "good"

CUDA = r'''
from torch.utils.cpp_extension import load_inline
SOURCE = """
#include <torch/types.h>
// __global__ void commented_out(float* o) {}
/* __global__ void cut_out(float* o) {} */
namespace mine { template <typename T> __global__ void scaled(const T* x, T* o, T a, int n) { } }
namespace { template <typename T, int N> __global__ __launch_bounds__(256, 2) void hidden(T* o, int n) { } }
extern "C" __global__ void plain_c(float* o, int n) { }
__global__ static void flat(float* o, int n) { }
template <> __global__ void special<float>(float* o) { }
static __device__ float helper(float x) { return x; }
"""
module = load_inline("names", [], [SOURCE], functions=["run"])
'''
TRITON = """
'''A docstring tells of __global__ void described(float*).'''
import triton, torch
from triton import jit
@triton.jit
def add_kernel(x): ...
@triton.autotune(configs=[], key=["n"])
@triton.jit
def tuned_mul(x): ...
@jit
def short(x): ...
@functools.partial(triton.jit, debug=True)
def bound(x): ...
def wrapped(x): ...
kernel = triton.jit(functools.partial(wrapped, n=1))
GENERATED = '''
@triton.jit
def written_later(x):
    pass
'''
@torch.jit.script
def scripted(x): ...
@torch.compile
def compiled(x): ...
"""
CUPY = """
import cupy
a = cupy.RawKernel('extern "C" __global__ void raw_gelu(float* x, int n) { }', "raw_gelu")
b = cupy.RawModule(code='template<typename T> __global__ void mod_k(T* x) { }', name_expressions=["mod_k<float>"])
c = cupy.ElementwiseKernel("float32 a, float32 b", "float32 c", "c = a * b + 1", "my_fma")
d = cupy.ElementwiseKernel("float32 a", "float32 c", "c = a + 1")
e = cupy.ReductionKernel("float32 a", "float32 c", "a * a", "a + b", "c = sqrt(a)", "0", "my_norm")
f = cupy.fuse(kernel_name="my_fused")(lambda a: a * 2 + 1)
"""
#: Kernels of the gallery, whose names were taken from what each library compiles for sm_90, without a GPU.
GALLERY = {
    "tilelang": "gelu_tile_kernel",
    "cute": "kernel_cutlass_gelu_kernel_tensorptrf32generico5242881_tensorptrf32generico5242881_0",
    "cutile": "gelu_kernel_Kt1_A1f32_1t1_A1f32_1t1_I1024",
    "numba": "_ZN6kernel11gelu_kernelB2v1B92cw51cXTLSUwv1sCUt9Uw1VEE5ArrayIfLi1E1C7mutable7alignedE",
    "jax": "gelu_kernel_mosaic_gpu",
}

OWN = {
    CUDA: [
        "void mine::scaled<float>(float const*, float*, float, int)",
        "flat(float*, int)",
        "plain_c",
        "void (anonymous namespace)::hidden<float, 3>(float*, int)",
        "void special<float>(float*)",
        "_ZN4mine6scaledIfEEvPKT_PS1_S1_i",
        "_ZL4flatPfi",
        "_ZN12_GLOBAL__N_16hiddenIfLi3EEEvPT_i",
        "_Z4flatPfi",
    ],
    TRITON: ["add_kernel", "tuned_mul", "short", "bound", "wrapped", "written_later", "add_kernel_0"],
    CUPY: [
        "raw_gelu", "void mod_k<float>(float*, int)", "my_fma", "kernel", "my_norm_pass1", "my_norm_pass2", "my_norm",
        "my_fused",
    ],
    **{Path(EXAMPLES, backend, "gelu.py").read_text(): [name] for backend, name in GALLERY.items()},
}  # fmt: skip
LIBRARY = [
    "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize128x64x8_stage3_warpsize2x2x1_ffma_aligna4_execute_kernel__5x_cublas",
    "nvjet_sm90_tst_128x64_64x8_1x2_h_bz_NNT",
    "cupy_exp__float32_float32",
    "void cub::CUB_300102_SM_750_800_860_890_900_1000_1200::detail::reduce::DeviceReduceKernel<cub::CUB_300102_SM_750_",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >(",
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, false>(float*, float const*)",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_cga1x1x1_kernel0_0",
    "triton_poi_fused_gelu_0",
    "void gemmSN_TN_kernel<float, 128, 16, 2, 4, 4, 4, true>(cublasGemmSmallNParams<float>)",
    "_ZN2at6native29vectorized_elementwise_kernelILi4EEEvi",
]


def assess(rows: dict[str, int], source: str, backend: str = "cuda") -> Provenance:
    return provenance.assess([(name, ns, 1) for name, ns in rows.items()], source, backend)


@pytest.mark.parametrize("source", OWN)
def test_only_a_kernel_of_the_source_is_its_own(source: str) -> None:
    for name in OWN[source]:
        result = assess({name: 1000}, source)
        assert (result.own_share, result.own, result.decoy) == (1.0, (name,), False)
    for name in LIBRARY:
        result = assess({name: 1000}, source)
        assert (result.own_share, result.library) == (0.0, (LibraryKernel(name=name, share=1.0),))
        assert result.decoy is True


def test_a_kernel_named_like_a_library_s_own_function_does_not_hide_the_library() -> None:
    source = "import triton\n@triton.jit\ndef vectorized_elementwise_kernel(x): ...\n"
    assert assess({"void at::native::vectorized_elementwise_kernel<4>(int)": 1000}, source, "triton").decoy is True


def test_shares_are_of_all_time_and_a_decoy_does_practically_nothing() -> None:
    library = LIBRARY[0]
    half = assess({"add_kernel": 300, library: 500, "[memcpy]": 200}, TRITON, "triton")
    assert (half.own_share, half.copies_share, half.decoy) == (0.3, 0.2, False)
    assert half.library == (LibraryKernel(name=library, share=0.5),)
    assert assess({"add_kernel": 10, library: 990}, TRITON, "triton").decoy is False
    assert assess({"add_kernel": 9, library: 991}, TRITON, "triton").decoy is True
    assert assess({"add_kernel": 9, library: 91, "[memcpy]": 9000}, TRITON, "triton").decoy is False


def test_what_cannot_be_told_accuses_nobody() -> None:
    assert assess({}, TRITON, "triton").decoy is False
    assert assess({}, TRITON, "triton").why == "nothing ran on the GPU"
    assert assess({"[memcpy]": 100}, TRITON, "triton").decoy is False
    made_up = assess({"void made_by_a_macro<float>(float*)": 90, LIBRARY[0]: 10}, CUDA)
    assert (made_up.unclear_share, made_up.decoy) == (0.9, False)
    assert assess({activities.REST: 90, LIBRARY[0]: 10}, CUDA).decoy is False


def test_only_a_policy_ends_a_decoy_s_evaluation() -> None:
    decoy = provenance.assess([(LIBRARY[0], 100, 1)], TRITON, "triton")
    honest = provenance.assess([("add_kernel", 100, 1)], TRITON, "triton")
    for policy in (Policy.ALLOW, Policy.FLAG):
        provenance.enforce(decoy, policy)
    for result in (honest, None):
        provenance.enforce(result, Policy.REJECT)
    with pytest.raises(EvaluationEnded) as ended:
        provenance.enforce(decoy, Policy.REJECT)
    outcome = ended.value.outcome
    assert (outcome.category, outcome.phase) == (Category.REWARD_HACK, Phase.CHECK)
    assert outcome.facts.hack == "decoy"


@given(st.text(max_size=400))
def test_any_source_has_an_answer(source: str) -> None:
    assess({"add_kernel": 10}, source)


# The page on which a candidate reports names ---------------------------------------------------------


@given(st.integers(0, 2000), st.integers(0, activities.MAX_NAME_BYTES + 50))
def test_what_does_not_fit_is_summed(count: int, length: int) -> None:
    page = activities.encode([("k" * length, 10, 2)] * count)
    assert len(page) <= activities.SIZE
    rows = activities.decode(page)
    assert (sum(row.ns for row in rows), sum(row.launches for row in rows)) == (10 * count, 2 * count)
    assert activities.REST not in [row.name for row in rows[:-1]]


@given(st.binary(max_size=400))
def test_any_bytes_are_rows_or_one_error(data: bytes) -> None:
    for page in (data, activities.encode([])[:8] + data, activities.encode([("k", 1, 1)] * 3)[:12] + data):
        try:
            rows = activities.decode(page)
        except activities.NotRecorded:
            continue
        assert len(rows) <= activities.SIZE
        assert all(row.name.isprintable() and len(row.name) <= activities.MAX_NAME_BYTES for row in rows)


def test_an_unwritten_page_and_a_failure_are_no_rows() -> None:
    with mmap.mmap(-1, activities.SIZE) as page:
        with pytest.raises(activities.NotRecorded, match="wrote nothing"):
            activities.decode(page)
        nothing = activities.encode([])
        page[: len(nothing)] = nothing
        assert activities.decode(page) == []
        failure = activities.encode_failure("no libcupti\x1b[2J here" + "!" * 1000)
        page[: len(failure)] = failure
        with pytest.raises(activities.NotRecorded, match="no libcupti\ufffd") as raised:
            activities.decode(page)
        assert len(str(raised.value)) <= activities.MAX_NAME_BYTES
