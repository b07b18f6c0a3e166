"""A full disk: the blame is on the process that filled it."""

from __future__ import annotations

import errno
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kqueue.categories import Category
from kqueue.contract import Limits, Outcome, Request, Settings, Timing
from tests.judge.extension import PROBLEM
from tests.judge.linear import FLOODS
from tests.judge.rig import Rig
from workers.judge.sandbox import seccomp

pytestmark = pytest.mark.slow("fills a disk")

#: Number of the system call, on every architecture.
FSOPEN = 430


def writes(megabytes: int) -> str:
    """Return a correct kernel that writes a file of this size."""
    write = f"open('file', 'wb').write(bytes({megabytes} << 20))"
    return PROBLEM.partition("def get_inputs")[0].replace("Model", "ModelNew").replace("return", f"{write}; return")


@pytest.fixture(scope="module")
def disk() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kqueue-disk-") as place:
        command = ["mount", "-t", "tmpfs", "-o", "size=128m,mode=711", "kqueue-test", place]
        Path(place).chmod(0o711)
        if (done := subprocess.run(command, capture_output=True, text=True, check=False)).returncode:
            pytest.skip(f"nothing can be mounted here: {done.stderr}")
        yield Path(place)
        subprocess.run(["umount", "--lazy", place], check=True)


def deny_mounts() -> None:
    """Refuse mounts to this thread and to its children, like a container's filter."""
    load, jump_if_equal, give = 0x20, 0x15, 0x06
    refused, allowed = 0x00050000 | errno.EPERM, 0x7FFF0000
    steps = [(load, 0, 0, 0), (jump_if_equal, 0, 1, FSOPEN), (give, 0, 0, refused), (give, 0, 0, allowed)]
    seccomp.enforce(b"".join(struct.pack("HBBI", *step) for step in steps))


@pytest.fixture(scope="module")
def small(disk: Path, judge_environment: None) -> Iterator[Rig]:
    """A slot whose scratch directory is on the disk, on a host without mounts."""
    # The fork server ends with the thread that starts it.
    with ThreadPoolExecutor(1, initializer=deny_mounts) as thread, thread.submit(Rig, disk=disk).result() as rig:
        assert "Operation not permitted" in str(rig.forkserver.isolation["mounts"])
        yield rig


def judge(rig: Rig, kernel: str, limits: Limits | None = None) -> Outcome:
    settings = Settings(checks=1, timing=Timing().off(), limits=limits or Limits())
    return rig.judge(Request(problem=PROBLEM, kernel=kernel, backend="torch", settings=settings))


def test_a_full_disk_is_no_kernels_fault(small: Rig, disk: Path) -> None:
    """A failure on a full disk is a judge error, and both kernels get their own verdicts when it has space."""
    needs, wrong = writes(8), writes(0).replace("x * 2", "x * 3")
    filler = disk / "filler"
    filler.write_bytes(bytes(126 << 20))
    for kernel, instead_of in ((needs, Category.OUTPUT_LIMIT), (wrong, Category.WRONG_VALUES)):
        outcome = judge(small, kernel)
        assert (outcome.category, outcome.facts.instead_of) == (Category.JUDGE_ERROR, instead_of), outcome
        assert "is full" in outcome.message
    filler.unlink()
    assert judge(small, needs).category is Category.PASSED
    assert judge(small, wrong).category is Category.WRONG_VALUES


def test_who_fills_the_disk_is_to_blame(small: Rig) -> None:
    assert judge(small, writes(200)).category is Category.OUTPUT_LIMIT
    assert judge(small, writes(8)).category is Category.PASSED


def test_files_are_weighed_where_nothing_can_be_mounted(small: Rig) -> None:
    outcome = judge(small, writes(0).replace("return", f"{FLOODS[0]}\n        return"), Limits(scratch_bytes=64 << 20))
    assert (outcome.category, outcome.facts.reason) == (Category.OUTPUT_LIMIT, "scratch")
