"""A product or a convolution that rounds its inputs to TF32 on a GPU."""

torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True

OPERATION = "matmul"


def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.conv2d(a, b) if OPERATION == "conv2d" else a @ b


def get_inputs():
    if OPERATION == "conv2d":
        return [torch.randn(16, 64, 64, 64), torch.randn(128, 64, 3, 3)]
    return [torch.randn(2048, 2048), torch.randn(2048, 2048)]
