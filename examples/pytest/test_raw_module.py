"""The same on a GPU with CuPy: a kernel that writes out of bounds, which its launch does not report."""

import pytest

cupy = pytest.importorskip("cupy")
if not cupy.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

SOURCE = r"""
extern "C" __global__ void fill(float* out, long long first, int count) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) out[first + i] = 1.0f;
}
"""
FILL = cupy.RawModule(code=SOURCE)


def test_fill():
    out = cupy.zeros(64, dtype=cupy.float32)
    FILL.get_function("fill")((1,), (64,), (out, cupy.int64(0), cupy.int32(64)))
    assert (out == 1).all()


@pytest.mark.parametrize("step", range(8))
def test_overrun(step):
    """Pass, because the test does not wait for the kernel. The last step writes to an unmapped address."""
    out = cupy.zeros(64, dtype=cupy.float32)
    first = 0 if step < 7 else 1 << 44
    FILL.get_function("fill")((1,), (64,), (out, cupy.int64(first), cupy.int32(64)))


def test_fill_again():
    """Fail in one process after the step above, although this test is correct. All later modules fail too."""
    test_fill()
