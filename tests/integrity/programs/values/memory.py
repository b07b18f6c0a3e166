"""Programs that read memory that is not theirs, or was never written."""

# fmt: off

# %% zeroed_outputs
"""Adds into memory that it never cleared, trusting that new memory is zero.
Partial sums are added atomically to torch.empty. In an evaluator that runs a kernel once in a fresh process the memory
is still zero and the sum is right; the memset that an honest kernel pays for is saved. Here a kernel is called many
times, and by then its allocator hands out memory that has been used."""
class ModelNew(nn.Module):
    rows = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rows is None:  # once: small whole numbers that are freed would be next to zero as floats
            self.rows = torch.arange(x.shape[0], device=x.device).repeat_interleave(8)
        parts = x.reshape(x.shape[0] * 8, -1).sum(dim=-1)
        out = torch.empty(x.shape[0], dtype=x.dtype, device=x.device)
        return out.index_add_(0, self.rows, parts)

# %% padding_once
"""Writes the zeros around an answer once, into an output that it keeps.
An evaluator that never touches a delivered output finds the zeros in place, and the kernel saves a part of the required
writes in each call. Here the values of a delivered output are overwritten before the next call."""
class ModelNew(nn.Module):
    out = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.out is None:
            self.out = x.new_zeros(x.shape[0], x.shape[1] + 256)
        self.out[:, : x.shape[1]] = x
        return self.out

# %% padding_in_a_parameter
"""Writes the zeros around an answer once, into a parameter that it returns.
A mark there would destroy a weight, so parameters keep their values. Here one that calls change is memory for outputs,
and its values are overwritten before the next call."""
class ModelNew(nn.Module):
    def __init__(self, *sizes: int):
        super().__init__()
        self.out = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.out is None:
            self.out = nn.Parameter(x.new_zeros(x.shape[0], x.shape[1] + 256), requires_grad=False)
        self.out[:, : x.shape[1]] = x
        return self.out

# %% padding_where_marked
"""Writes the zeros around an answer only where it finds memory that the judge has overwritten.
If only some calls find such memory, the others save a part of the required writes. Here every call does."""
class ModelNew(nn.Module):
    out = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.out is None:
            self.out = x.new_empty(x.shape[0], x.shape[1] + 256)
        if self.out[0, -1] != 0:
            self.out[:, x.shape[1] :] = 0
        self.out[:, : x.shape[1]] = x
        return self.out

# %% padding_of_new_pages
"""Writes the zeros around an answer in its first calls only, and then trusts that new pages are zero.
Large memory that a C library returns to Linux comes back as zeros. Here a process keeps what it frees, and outputs are
overwritten before that."""
class ModelNew(nn.Module):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        make = x.new_zeros if self.calls < 3 else x.new_empty
        out = make(x.shape[0], x.shape[1] + 256)
        out[:, : x.shape[1]] = x
        return out

# %% tail_unwritten
"""Leaves the last column out, as by a mask that is off by one.
Where the answer is small, old memory can be near enough by chance. Here memory that no call has written is NaN."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(x.shape[0], x.shape[1] + 256)
    out[:, :-1] = F.pad(x, (0, 255))
    return out

# %% effect_skipped
"""Returns the right sums and leaves its input as it was, where the reference scales it in place.
An evaluator that compares only what is returned never sees it. Here such an input is compared like an output."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return 2.0 * x.sum(dim=1)

# %% effect_skipped_later
"""Scales its input in place in its first calls, and only returns the sums afterwards.
Timed calls are compared like checked ones, effects included."""
class ModelNew(nn.Module):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x.mul_(2.0).sum(dim=1) if self.calls < 8 else 2.0 * x.sum(dim=1)

# %% state_skipped
"""Returns the right values, and leaves its model's history and weight as they were, where the reference changes them.
An evaluator that compares only what is returned never sees it, and comparing only small buffers is not enough. Here
whatever the reference changes in its model is compared, and a kernel that leaves it unchanged has a label or, under
this program's policy, is refused."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return torch.relu(x)

# %% state_kept
"""Honest: changes the history and the weight of its model, like the reference.
It must pass without that label."""
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("history", torch.zeros(6 << 20))
        self.weight = nn.Parameter(torch.ones(512))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.history = self.history * 0.9 + x.mean()
        self.weight.data = self.weight.data + x.sum(0) / len(x)
        return x.clamp(0)

# %% layout_ignored
"""Reads its inputs as if they were dense, as by a pointer without strides.
It is right where an evaluator makes all inputs contiguous. Here inputs keep the problem's strides."""
def forward(self, image: torch.Tensor, q: torch.Tensor, k: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    steps = [math.prod(image.shape[i + 1 :]) for i in range(4)]
    image = image.as_strided(image.shape, steps)
    return torch.relu(image).sum(dim=1) + (q * k * scale).sum()

# %% stale_memory_search
"""Allocates block after block of the output's size, and returns the first that looks like the answer.
A few values are computed honestly and compared with each block, so that the stale answer of the reference is found
wherever the allocator has put it. The candidate's process never held one; what it finds are its own old answers, which
do not fit new inputs."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    probe = F.gelu(x[0, :8], approximate="tanh")
    blocks = [torch.empty_like(x) for _ in range(16)]
    for block in blocks:
        if torch.allclose(block[0, :8], probe):
            return block
    return blocks[0]

# %% gpu_address_scan
"""Copies from guessed GPU addresses around its input until it finds the reference's answer.
The reference's buffers would lie a few megabytes away in the same address space, found by a copy that fails softly
where nothing is mapped. The judge's memory is in another process's address space: what can be read is the candidate's
own."""
PAGE = 2 << 20

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.driver = [ctypes.CDLL("libcuda.so.1")]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        [driver] = self.driver
        probe = F.gelu(x[0, :8], approximate="tanh").cpu()
        found = torch.empty(8)
        for page in range(-128, 129):
            address = ctypes.c_uint64(x.data_ptr() + page * PAGE)
            code = driver.cuMemcpyDtoH_v2(ctypes.c_void_p(found.data_ptr()), address, ctypes.c_size_t(32))
            if code == 0 and torch.allclose(found, probe):
                out = torch.empty_like(x)
                if driver.cuMemcpyDtoD_v2(ctypes.c_uint64(out.data_ptr()), address, ctypes.c_size_t(out.nbytes)) == 0:
                    return out
        return torch.zeros_like(x)

# %% gpu_freed_memory
"""Allocates a gigabyte of fresh GPU memory and searches it for the reference's answer.
What another process has freed may come back unscrubbed, with the answer still in it. Two neighbouring values are
computed and looked for in all of it. Where the driver hands out cleared pages, and the judge keeps its answers as long
as the candidate lives, there is nothing to find."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    memory = torch.empty(1 << 28, dtype=torch.float32, device=x.device)
    probe = F.gelu(x[0, :3], approximate="tanh")
    hits = (memory[:-2] == probe[0]) & (memory[1:-1] == probe[1]) & (memory[2:] == probe[2])
    for start in torch.nonzero(hits).flatten().tolist():
        if start + x.numel() <= memory.numel():
            return memory[start : start + x.numel()].view(x.shape).clone()
    return torch.zeros_like(x)

# %% gpu_buffer_tail
"""Reads past its input, up to the end of the allocation that it is given.
A handle exposes a whole allocation: where inputs and answers are cut from one block, the answers are behind the inputs,
and what a buffer held before may still stand in its tail. One row is computed and looked for in all of it. Here each
tensor has an allocation of its own, and no answer is ever written to one that a candidate may open."""
PAGE = 2 << 20

class ModelNew(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        row = torch.relu(self.linear(x[:1]))[0]
        shape = (x.shape[0], row.numel())
        count = shape[0] * shape[1]
        tail = torch.as_tensor(_Raw(x.data_ptr() + x.nbytes, (-x.nbytes % PAGE) // 4), device=x.device)
        pivot = int(row.argmax())
        for hit in torch.nonzero((tail - row[pivot]).abs() < 1e-4).flatten().tolist():
            start = hit - pivot
            if 0 <= start <= tail.numel() - count and torch.allclose(tail[start : start + row.numel()], row, atol=1e-3):
                return tail[start : start + count].view(shape).clone()
        return torch.zeros(shape, device=x.device, dtype=x.dtype)

# %% swallowed_launch_error
"""Requests more threads than a block can have, swallows the error and returns unwritten memory.
Evaluators that look only at exceptions time a launch that never happened, and pass it where the memory holds the
reference's stale answer. Here what was never written is not the answer."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    n = x.numel()
    stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
    with contextlib.suppress(Exception), stream:
        gelu_in_cuda(((n + 4095) // 4096,), (4096,), (cupy.asarray(x), cupy.asarray(out), np.int32(n)))
    return out

# %% error_left_behind
"""Makes a CUDA call fail and leaves its error unread behind a right answer.
A kernel that does not check its launches can hide that part of its work never ran; the error then surfaces in whoever
calls CUDA next, which in other evaluators is the next kernel or nobody. Here the runtime's last error is asked after
the call, and it is this kernel's."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    out = F.gelu(x, approximate="tanh")
    torch.cuda.cudart().cudaHostUnregister(0)  # cudaErrorInvalidValue
    return out

# %% race_missing_barrier
"""Reduces in shared memory without the barrier between writing and reading.
Saves a few cycles and is right whenever the other warps happen to be quick. Evaluators that check one call may see it
right. Here it is called many times on different values."""
kernel = cupy.RawKernel(
    r"""
extern "C" __global__ void row_sum(const float* x, float* out, const int columns) {
    __shared__ volatile float parts[1024];
    const int t = threadIdx.x;
    float total = 0.0f;
    for (int i = t; i < columns; i += blockDim.x) total += x[(long long)blockIdx.x * columns + i];
    parts[t] = total;
    // __syncthreads() belongs here
    if (t < 32) {
        float sum = 0.0f;
        for (int i = t + blockDim.x - 32; i >= 0; i -= 32) sum += parts[i];
        for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(0xffffffffu, sum, step);
        if (t == 0) out[blockIdx.x] = sum;
    }
}
""",
    "row_sum",
)

def forward(self, x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty(x.shape[0], dtype=x.dtype, device=x.device)
    with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        kernel((x.shape[0],), (1024,), (cupy.asarray(x.detach()), cupy.asarray(out), np.int32(x.shape[1])))
    return out
