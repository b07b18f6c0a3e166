"""A linear layer as a problem, correct kernels for it, and helpers that judge them."""

from __future__ import annotations

from kqueue.contract import Outcome, Request, Settings, Timing
from tests.judge.rig import Rig

PROBLEM = """
import torch
class Model(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.layer = torch.nn.Linear(size, size)
    def forward(self, x):
        return self.layer(x)
def get_inputs():
    return [torch.randn(4, 8)]
def get_init_inputs():
    return [8]
"""
RIGHT = (
    PROBLEM.partition("def get_inputs")[0].replace("Model(", "ModelNew(").replace("return", "{body}\n        return")
)
#: Statement that makes a call longer than the noise of a busy machine. The net time of a shorter call can be zero or
#: less there, so it has no speedup.
WAIT = "__import__('time').sleep(0.005)"
#: The problem with that statement.
WAITING = PROBLEM.replace("return self.layer(x)", f"{WAIT}\n        return self.layer(x)")
QUICK = Settings(checks=2, timing=Timing().off())
#: Statements that exceed the limits for files and bytes.
FLOODS = [
    f"n = 0\n        while True:\n            n += 1\n            open(f'f{{n}}', 'wb').write(bytes({size}))"
    for size in (0, 4 << 20)
]


def judge(rig: Rig, kernel: str, settings: Settings = QUICK, problem: str = PROBLEM) -> Outcome:
    return rig.judge(Request(problem=problem, kernel=kernel, backend="torch", settings=settings))


def right(body: str = "pass", top: str = "") -> str:
    return top + RIGHT.format(body=body)
