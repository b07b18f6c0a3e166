"""Returns a dense output where the reference's is dear to copy, and slows the calls without a forward.

What a call costs beside the kernel is taken with nulls of kernel and reference, and the smaller counts. If the kernel
slows its own, the reference's counts, which pays for the copy of a strided output that this kernel never makes. A null
must pay for the copy that the call beside it pays for, and nothing else.
"""

EXTRA_MS = 0
#: Return the reference's layout in every third call: what takes no copy is faster, honestly, but the median is not.
ALTERNATE = False


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.done = False
        self.calls = 0

    def sabotage(self, candidate, on_gpu):
        deliver = candidate.deliver

        def slowed(command, output):
            if command.order.name.endswith("NULL"):
                take(on_gpu, 10)
            return deliver(command, output)

        candidate.deliver = slowed
        self.done = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.done:
            self.sabotage(harness(), x.is_cuda)
        if EXTRA_MS:
            take(x.is_cuda, EXTRA_MS)
        self.calls += 1
        output = torch.tanh(x[:, ::2]).t()
        return output if ALTERNATE and self.calls % 3 == 0 else output.contiguous()
