"""A kernel for one shape only: sizes are written into it.

Not a cheat by itself: the problem's shapes are fixed, and a specialised kernel is what is asked for. It passes, with
its honest time. (Asked for another shape it would fail, which the problem never does.)
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    assert x.shape == (512, 1024)
    return F.gelu(x.view(524288), approximate="tanh").view(512, 1024)
