"""Rounds the inputs of an fp32 product to 16 bits, and adds in fp32.

Tensor cores are several times faster on 16 bits. Of terms that are all positive the errors cancel and the sum does
not, so that every value lies within the tolerance. It may pass; the error beside that of fp32 tells what it is.
"""

FORMAT = "float16"


def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a, b = a.to(getattr(torch, FORMAT)), b.to(getattr(torch, FORMAT))
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()  # products of 16 bits are exact in fp32
