"""Honest kernels in CUDA, Triton and of compilers."""

# fmt: off

# %% cuda_graph
"""Honest: a CUDA graph of the chain, with its inputs copied in at every call.
Static buffers, captured at the first call, replayed, and cloned out: what a stale replay looks like, but is not."""
class ModelNew(nn.Module):
    graph = None

    def capture(self, x):
        self.x = x.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            chain(self.x)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = chain(self.x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.graph is None:
            self.capture(x)
        self.x.copy_(x)
        self.graph.replay()
        return self.out.clone()

# %% cuda_graph_of_triton
"""Honest: a CUDA graph of a Triton kernel, recorded in the first call.
A warm-up that only compiles leaves its launches out, so what it records must not be kept."""
class ModelNew(nn.Module):
    graph = None

    def launch(self):
        gelu_kernel[(triton.cdiv(self.x.numel(), 1024),)](self.x, self.out, self.x.numel(), BLOCK=1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.graph is None:
            self.x, self.out = x.clone(), torch.empty_like(x)
            self.launch()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.launch()
        self.x.copy_(x)
        self.graph.replay()
        return self.out.clone()

# %% cuda_graph_of_matmul
"""Honest: a CUDA graph of one large product, returned from its static buffer.
One kernel dominates: its time is that of the same kernel without a graph."""
class ModelNew(nn.Module):
    graph = None

    def capture(self, a, b):
        self.a, self.b = a.clone(), b.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.a @ self.b
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = self.a @ self.b

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if self.graph is None:
            self.capture(a, b)
        self.a.copy_(a)
        self.b.copy_(b)
        self.graph.replay()
        return self.out

# %% cupy_fused_chain
"""Honest: the whole chain fused into one kernel.
Sixty-four launches become one: much faster than the reference, and rightly so."""
kernel = cupy.RawKernel(
    r"""
extern "C" __global__ void chain(const float* x, float* out, const int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float v = x[i];
    float y = v;
    for (int step = 0; step < 32; ++step) y = tanhf(0.5f * y + v);
    out[i] = y;
}
""",
    "chain",
)

def forward(self, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    n = x.numel()
    with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        kernel(((n + 127) // 128,), (128,), (cupy.asarray(x.detach()), cupy.asarray(out), np.int32(n)))
    return out

# %% cupy_wide_gelu
"""Honest: GELU in CUDA C++ through CuPy.
Compiled by NVRTC at the first call, launched on torch's current stream."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    x, out, n = x.contiguous(), torch.empty_like(x), x.numel()
    with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        gelu_in_cuda(((n + 255) // 256,), (256,), (cupy.asarray(x.detach()), cupy.asarray(out), np.int32(n)))
    return out

# %% torch_compile
"""Honest: torch.compile instead of a custom kernel.
Compiled at the first call. Its kernels are torch's, which the provenance says; that alone is no fault."""
compiled = torch.compile(chain)

def forward(self, x: torch.Tensor) -> torch.Tensor: return compiled(x)

# %% torch_chain
"""Honest: many small launches one after another.
What kernels on this problem are compared with."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return chain(x)

# %% torch_gelu
"""Honest: torch's own GELU.
The plainest kernel there is."""

# %% torch_heavy_matmul
"""Honest: cuBLAS by torch, hundreds of microseconds.
What kernels on this problem are compared with."""
def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor: return a @ b

# %% triton_autotuned_matmul
"""Honest: Triton's autotuner at the first call.
It launches candidates of its own, times them with events and flushes caches inside forward(): all before the clock
looks."""
@triton.autotune(
    configs=[
        triton.Config({"BM": 32, "BN": 32, "BK": 32}, num_warps=4),
        triton.Config({"BM": 64, "BN": 32, "BK": 32}, num_warps=4),
        triton.Config({"BM": 64, "BN": 64, "BK": 16}, num_warps=8),
    ],
    key=["M", "N", "K"],
)
@triton.jit
def matmul_kernel(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        k = start + inner
        a = tl.load(a_ptr + rows[:, None] * K + k[None, :], mask=(rows[:, None] < M) & (k[None, :] < K), other=0.0)
        b = tl.load(
            b_ptr + k[:, None] * N + columns[None, :], mask=(k[:, None] < K) & (columns[None, :] < N), other=0.0
        )
        total += tl.dot(a, b, input_precision="ieee")
    mask = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], total, mask=mask)

def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a, b = a.contiguous(), b.contiguous()
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n, dtype=a.dtype, device=a.device)
    matmul_kernel[lambda meta: (triton.cdiv(m, meta["BM"]), triton.cdiv(n, meta["BN"]))](a, b, c, m, n, k)
    return c

# %% triton_half_gelu
"""Honest: GELU in Triton in half precision.
Judged with the tolerance of its dtype."""
@triton.jit
def gelu_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=mask)

def forward(self, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    n = x.numel()
    gelu_kernel[(triton.cdiv(n, 1024),)](x, out, n, BLOCK=1024)
    return out

# %% triton_large_add_relu
"""Honest: memory-bound on 128 MB.
As near to the bandwidth of the memory as a kernel comes: the floor from physics must not be above it."""
@triton.jit
def add_relu_kernel(x_ptr, out_ptr, shift, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, tl.maximum(x + shift, 0.0), mask=mask)

class ModelNew(nn.Module):
    def __init__(self, shift: float):
        super().__init__()
        self.shift = shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        n = x.numel()
        add_relu_kernel[(triton.cdiv(n, 4096),)](x, out, self.shift, n, BLOCK=4096)
        return out

# %% triton_layer_norm
"""Honest: LayerNorm in Triton, with weights.
The parameters come from the same constructor and seed as the reference's."""
@triton.jit
def layer_norm_kernel(x_ptr, weight_ptr, bias_ptr, out_ptr, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < columns
    x = tl.load(x_ptr + row * columns + offsets, mask=mask, other=0.0)
    mean = tl.sum(x, axis=0) / columns
    centred = tl.where(mask, x - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / columns + eps)
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0)
    bias = tl.load(bias_ptr + offsets, mask=mask, other=0.0)
    tl.store(out_ptr + row * columns + offsets, centred * scale * weight + bias, mask=mask)

class ModelNew(nn.Module):
    def __init__(self, features: int):
        super().__init__()
        self.norm = nn.LayerNorm(features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        rows, columns = x.shape
        layer_norm_kernel[(rows,)](
            x, self.norm.weight, self.norm.bias, out, columns, self.norm.eps, BLOCK=triton.next_power_of_2(columns)
        )
        return out

# %% triton_wide_gelu
"""Honest: GELU in Triton.
A hand-written kernel of ordinary form."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    x, out, n = x.contiguous(), torch.empty_like(x), x.numel()
    gelu_kernel[(triton.cdiv(n, 1024),)](x, out, n, BLOCK=1024)
    return out
