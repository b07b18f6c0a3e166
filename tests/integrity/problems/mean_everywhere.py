"""The mean of every column, written to each of its places."""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    return x.mean(dim=0, keepdim=True) + torch.zeros_like(x)


def get_inputs():
    return [torch.randn(512, 1024)]
