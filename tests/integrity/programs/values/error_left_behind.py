"""Lets a call into CUDA fail and leaves its error unread behind a right answer.

A kernel that does not check its launches can hide that part of its work never ran; the error then surfaces in
whoever calls CUDA next, which in other evaluators is the next kernel or nobody. Here the runtime's last error is
asked after the call, and it is this kernel's.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    out = F.gelu(x, approximate="tanh")
    torch.cuda.cudart().cudaHostUnregister(0)  # cudaErrorInvalidValue
    return out
