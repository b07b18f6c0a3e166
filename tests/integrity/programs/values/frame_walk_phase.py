"""Reads from its callers' frames whether this call is checked or timed, and works only when checked.

The candidate's own loop has the judge's order in a local variable, so a kernel can know: it answers what is checked
and returns an old answer where it believes that only time counts. Here the outputs of timed calls are kept, and a
secret choice of them is compared with answers that only the judge has.
"""


def timed() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        for value in list(frame.f_locals.values()):
            name = getattr(getattr(value, "order", None), "name", "")
            if name in ("TIME", "ENQUEUE"):
                return True
        frame = frame.f_back
    return False


class ModelNew(nn.Module):
    last = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.last is None or not timed():
            self.last = F.gelu(x, approximate="tanh")
        return self.last
