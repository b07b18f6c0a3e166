"""Programs that only look like kernels of their own."""

# fmt: off

# %% decoy_never_called
"""Defines a Triton kernel, but never launches it: torch's operator computes the answer.
Who only searches the source for @triton.jit sees a hand-written kernel. Here the verdict's provenance tells the share
of GPU time in kernels compiled from the candidate's own source: none. It passes with torch's time, or is refused, as
the evaluation's policy says."""
gelu_kernel

# %% decoy_fallback
"""Launches a kernel that cannot compile inside try and except, and falls back to torch.
It always falls back: a block of 1000 elements is no power of two. Whoever looks at the source sees a careful author.
The verdict's provenance shows that none of the GPU's time went to code of its own."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    try:
        out = torch.empty_like(x)
        gelu_kernel[(triton.cdiv(x.numel(), 1000),)](x, out, x.numel(), BLOCK=1000)
        return out
    except Exception:
        return F.gelu(x, approximate="tanh")

# %% decoy_token_kernel
"""Launches its own kernel on 16 values, and computes all the rest with torch.
A rule that asks for one launch of an own kernel is satisfied. The share of GPU time in own kernels is not: the
verdict's provenance gives it, and by policy a small one is refused."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    out = F.gelu(x, approximate="tanh")
    gelu_kernel[(1,)](x, out, 16, BLOCK=16)
    return out

# %% decoy_library
"""Calls a vendor library's product under the name of a hand-written kernel.
A Triton kernel is there and copies nothing that matters; the work is cuBLAS's, by torch.mm. The answer and the time are
honest, the authorship is not: the verdict's provenance names whose kernels took the time."""
@triton.jit
def matmul_kernel(out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(out_ptr + offsets, mask=offsets < n)
    tl.store(out_ptr + offsets, value, mask=offsets < n)

def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = torch.mm(a, b)
    matmul_kernel[(1,)](out, 1, BLOCK=16)
    return out

# %% decoy_torch_compile
"""Compiles the reference's own code with torch.compile and calls that a Triton kernel.
The generated kernels are Triton's, none of them is the candidate's. Passing is no lie about speed, only about who wrote
it: provenance tells kernels that torch's compiler wrote from those in the candidate's source."""
import triton  # noqa: F401

@torch.compile
def gelu(x): return F.gelu(x, approximate="tanh")
def forward(self, x: torch.Tensor) -> torch.Tensor: return gelu(x)

# %% policy_obvious
"""An obvious cheat that static rules see: it patches clocks and events, and catches everything.
Right answers and an honest time by the judge's clock, so that it passes where findings are only labels. An evaluation
whose policy rejects findings ends it before a device is used."""
time.time = time.perf_counter = time.monotonic = lambda: 0.0
torch.cuda.synchronize = lambda *_: None
torch.cuda.Event.elapsed_time = lambda *_: 0.001
