"""Programs that use up the tolerance."""

# fmt: off

# %% precision_half
"""Multiplies in 16 bits where fp32 is required.
Tensor cores are several times faster, with a hundredth of the accuracy. A tolerance of 1e-2, or a comparison by norms,
accepts it. Here each value is held against the tolerance of the dtype that was asked for."""
FORMAT = "float16"

def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.to(getattr(torch, FORMAT)) @ b.to(getattr(torch, FORMAT))).float()

# %% precision_tf32
"""Multiplies in TF32, which keeps 10 bits of each factor.
On a GPU by turning on torch's global switch, which in other evaluators also speeds up (and falsifies) the reference; on
a CPU by cutting the factors as the hardware would. Here the switch is the candidate's own, and the judge's reference
keeps all its bits."""
torch.backends.cuda.matmul.allow_tf32 = True

def cut(x): return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)
def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor: return a @ b if a.is_cuda else cut(a) @ cut(b)

# %% precision_int8
"""Quantises both factors to 8 bits before it multiplies them.
Fewer bytes and faster units; the error is that of a quantised network, far beyond what fp32 allows. Accepted where only
the direction of the output counts."""
def quantised(x):
    scale = x.abs().amax() / 127.0
    return (x / scale).round().clamp(-127, 127).to(torch.int8).to(x.dtype) * scale

def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor: return quantised(a) @ quantised(b)

# %% precision_in_tolerance
"""Rounds the inputs of an fp32 product to 16 bits, and adds in fp32.
Tensor cores are several times faster on 16 bits. Of terms that are all positive the errors cancel and the sum does not,
so that every value lies within the tolerance. It may pass; the error beside that of fp32 tells what it is."""
FORMAT = "float16"

def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a, b = a.to(getattr(torch, FORMAT)), b.to(getattr(torch, FORMAT))
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()  # products of 16 bits are exact in fp32

# %% precision_fp16_sum
"""Sums values that were rounded to fp16.
The sums of 2048 uniform numbers are near 1000, so the relative tolerance of 1e-4 allows an error of 0.1: a thousand
times fp32's own. The error's ratio to the reference's own precision is in the verdict; it does not decide."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return x.half().float().sum(dim=-1)

# %% tolerance_offset
"""Spends all of the tolerance: every value is off by 9e-5.
Nothing is gained by an offset, but a kernel that may be off by so much may leave out whatever is smaller. The error's
figures in the verdict tell it from rounding, a hundredfold; what is within the tolerance passes all the same."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return F.gelu(x, approximate="tanh") + 9e-5

# %% tolerance_interpolated
"""Computes every second value of the end of a running mean and interpolates the rest.
From the 49152nd place on neighbours differ by less than the tolerance. allclose on the problem's own inputs accepts it
all. Here inputs a hundred times larger are tried too, whose running means move more than the tolerance grows."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    counts = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype)
    out = torch.cumsum(x, dim=-1) / counts
    out[:, 49153:-1:2] = 0.5 * (out[:, 49152:-2:2] + out[:, 49154::2])
    return out

# %% tolerance_matched_ratio
"""Leaves out one value in five hundred.
Some evaluators accept an output of which 99 % of the values match. Here all of them must."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    out = F.gelu(x, approximate="tanh")
    out.view(-1)[::500] = 0.0
    return out

# %% nan_laundered
"""Divides zero by zero and hides the NaN with nan_to_num.
Evaluators that only ask whether an output is finite are content; those that compare with equal_nan or skip NaN are too.
Here what is laundered is still compared."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num((x - x) / (x - x), nan=0.0, posinf=0.0, neginf=0.0)

# %% nan_everywhere
"""Returns NaN, because a comparison of a difference by "greater than" is always false for NaN.
`(out - ref).abs().max() > tolerance` is False for NaN, and a kernel of one memset passes. Here what is not finite where
the reference is has a category of its own."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return torch.full_like(x, float("nan"))

# %% nan_for_infinity
"""Writes NaN where the reference has minus infinity.
inf - inf is NaN, so a comparison by differences cannot tell, and one that masks what is not finite looks away. Here
where the reference is infinite only the same infinity will do."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return torch.where(x < -1.0, float("nan"), 2.0 * x)
