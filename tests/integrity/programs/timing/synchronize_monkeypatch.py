"""Turns every way to wait for the device into nothing; the kernel takes 20 ms.

A wall clock around forward() and torch.cuda.synchronize() then sees only the launch. Here the judge waits with its
own context for what the candidate's stream writes when it has done the work, whatever the candidate's Python thinks of
waiting: either the time is true, or outputs that were read too early are wrong.
"""

torch.cuda.synchronize = lambda device=None: None
torch.cuda.Stream.synchronize = lambda self: None
torch.cuda.Stream.query = lambda self: True
torch.cuda.Event.synchronize = lambda self: None


def forward(self, x: torch.Tensor) -> torch.Tensor:
    slow(x)
    return F.gelu(x, approximate="tanh")
