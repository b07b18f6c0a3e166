"""The command on this machine, with one judge for all commands."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kqueue import judging
from kqueue.judging import LocalJudge
from tests.cli.command import Cli
from tests.samples import RELU, RELU_KERNEL

__all__ = ["cli", "kept"]


@pytest.fixture
def kept(local: LocalJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands use that judge, which outlives them."""
    monkeypatch.setattr(judging, "LocalJudge", lambda device, **_: {"cpu": local}.get(device))
    monkeypatch.setattr(local, "close", lambda: None)


@pytest.fixture
def cli() -> Iterator[Cli]:
    """Return the command in a folder with a problem and kernels, without any reachable service."""
    with tempfile.TemporaryDirectory(prefix="kqueue-test-") as name:
        root = Path(name)
        root.chmod(0o711)
        nowhere = {
            "KQUEUE_SCRATCH": str(root / "scratch"),
            "KQUEUE_DATABASE_URL": "postgresql+psycopg://nobody:secret@127.0.0.1:1/none",
            "KQUEUE_REDIS_URL": "redis://:secret@127.0.0.1:1/0",
        }
        ready = Cli(root, nowhere)
        ready.write("relu.py", RELU)
        ready.write("right.py", RELU_KERNEL.format("return torch.clamp(x, min=0)"))
        ready.write("wrong.py", RELU_KERNEL.format("print('trace \\x1b[31m'); return torch.relu(x) + 1"))
        ready.write("endless.py", RELU_KERNEL.format("time.sleep(600)"))
        yield ready
