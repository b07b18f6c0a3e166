"""Overwrites cudaDeviceSynchronize and cudaStreamSynchronize in the loaded CUDA runtime; the kernel takes 20 ms.

Whoever waits for the device in this process, from whatever language, returns at once, and a wall clock sees only the
launch. The judge does not believe that the candidate has waited: it reads outputs too early, which are then wrong, or it
waits itself and the time is true.
"""

for name in ("cudaDeviceSynchronize", "cudaStreamSynchronize"):
    overwrite(getattr(cudart(), name), bytes.fromhex("31c0 c3"))  # xor eax, eax; ret


def forward(self, x: torch.Tensor) -> torch.Tensor:
    torch.cuda._sleep(40_000_000)
    return F.gelu(x, approximate="tanh")
