"""A kernel that omits a tail, and a function that runs `repro.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TAIL = """
import torch
N = 3001
class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2
def get_inputs():
    return [torch.randn(4, N)]
"""
#: Omits the tail of long rows only.
TAIL_KERNEL = """
import torch
class ModelNew(torch.nn.Module):
    def forward(self, x):
        out = x * 2
        if x.shape[1] > 40:
            out[:, x.shape[1] // 32 * 32:] = 0
        return out
"""


def execute(source: str, folder: Path) -> tuple[int, str]:
    """Run repro.py far from kqueue, and return its status and output."""
    file = folder / "repro.py"
    file.write_text(source)
    done = subprocess.run(
        [sys.executable, "-I", str(file)], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, done.stdout + done.stderr


def fails(source: str | None, folder: Path, said: str = "") -> None:
    """Assert that repro.py fails by itself with this message."""
    assert source is not None
    status, printed = execute(source, folder)
    assert (status, said in printed) == (1, True), printed
