"""Asks for more threads than a block may have, swallows the error and returns what was in the memory.

Evaluators that look only at exceptions time a launch that never happened, and pass it where the memory holds the
reference's stale answer. Here what was never written is not the answer.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    n = x.numel()
    stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
    with contextlib.suppress(Exception), stream:
        gelu_in_cuda(((n + 4095) // 4096,), (4096,), (cupy.asarray(x), cupy.asarray(out), np.int32(n)))
    return out
