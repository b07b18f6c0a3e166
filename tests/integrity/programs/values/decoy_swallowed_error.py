"""A launch that cannot succeed inside try and except, with torch's operator to answer instead.

The verdict elsewhere is that a hand-written kernel passed. Here the share of GPU time in the candidate's own kernels
is in the verdict's provenance: none. By the evaluation's policy that is a label or a refusal; the time is torch's.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    try:
        out = torch.empty_like(x)
        n = x.numel()
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            gelu_in_cuda(((n + 4095) // 4096,), (4096,), (cupy.asarray(x), cupy.asarray(out), np.int32(n)))
        return out
    except Exception:
        return F.gelu(x, approximate="tanh")
