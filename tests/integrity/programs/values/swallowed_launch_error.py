"""Asks for more threads than a block may have, swallows the error and returns what was in the memory.

Evaluators that look only at exceptions time a launch that never happened, and pass it where the memory holds the
reference's stale answer. Here what was never written is not the answer.
"""

kernel = cupy.RawKernel(
    r"""
extern "C" __global__ void gelu(const float* x, float* out, const int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] / (1.0f + __expf(-x[i] * (1.5957691216057308f + 0.07135481282553499f * x[i] * x[i])));
}
""",
    "gelu",
)


def forward(self, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    n = x.numel()
    stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
    with contextlib.suppress(Exception), stream:
        kernel(((n + 4095) // 4096,), (4096,), (cupy.asarray(x), cupy.asarray(out), np.int32(n)))
    return out
