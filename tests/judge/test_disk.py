"""A disk that is full: whoever filled it is to blame, and nobody else."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kqueue.categories import Category
from kqueue.contract import Backend, Outcome, Request, Settings, Timing
from tests.judge.rig import Rig

pytestmark = pytest.mark.slow("fills a disk")

PROBLEM = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return x + 1
def get_inputs():
    return [torch.randn(8)]
def get_init_inputs():
    return []
"""


def writes(megabytes: int) -> str:
    """A right kernel that needs room for files."""
    write = f"open('file', 'wb').write(bytes({megabytes} << 20))"
    return PROBLEM.partition("def get_inputs")[0].replace("Model", "ModelNew").replace("return", f"{write}; return")


@pytest.fixture(scope="module")
def disk() -> Iterator[Path]:
    """A disk of 128 MiB."""
    with tempfile.TemporaryDirectory(prefix="kqueue-disk-") as place:
        command = ["mount", "-t", "tmpfs", "-o", "size=128m,mode=711", "kqueue-test", place]
        Path(place).chmod(0o711)
        if (done := subprocess.run(command, capture_output=True, text=True, check=False)).returncode:
            pytest.skip(f"nothing can be mounted here: {done.stderr}")
        yield Path(place)
        subprocess.run(["umount", "--lazy", place], check=True)


@pytest.fixture(scope="module")
def small(disk: Path, judge_environment: None) -> Iterator[Rig]:
    """A slot whose scratch is on it."""
    with Rig(disk=disk) as rig:
        yield rig


def judge(rig: Rig, kernel: str) -> Outcome:
    """What comes of it."""
    settings = Settings(checks=1, timing=Timing(enabled=False))
    outcome = rig.judge(Request(problem=PROBLEM, kernel=kernel, backend=Backend.TORCH, settings=settings))
    assert isinstance(outcome, Outcome)
    return outcome


def test_a_full_disk_is_no_kernels_fault(small: Rig, disk: Path) -> None:
    """What fails while there is no room is tried again; with room both kernels are what they are."""
    needs, wrong = writes(8), writes(0).replace("x + 1", "x + 2")
    filler = disk / "filler"
    filler.write_bytes(bytes(126 << 20))
    for kernel, instead_of in ((needs, Category.RUNTIME_ERROR), (wrong, Category.WRONG_VALUES)):
        outcome = judge(small, kernel)
        assert (outcome.category, outcome.facts.instead_of) == (Category.JUDGE_ERROR, instead_of), outcome
        assert "is full" in outcome.message
    filler.unlink()
    assert judge(small, needs).category is Category.PASSED
    assert judge(small, wrong).category is Category.WRONG_VALUES


def test_who_fills_the_disk_is_to_blame(small: Rig) -> None:
    """However quickly, and the next kernel has room again."""
    for _ in range(2):
        assert judge(small, writes(200)).category is Category.RUNTIME_ERROR
    assert judge(small, writes(8)).category is Category.PASSED
