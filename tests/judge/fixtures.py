"""Fixtures of a judge without a queue: pytest loads this module as a plugin."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kqueue.config import load
from kqueue.judging import LocalJudge

if TYPE_CHECKING:  # it imports torch, which most folders do not need
    from tests.judge.rig import Rig


@contextlib.contextmanager
def _environment() -> Generator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("KQUEUE_DATABASE_URL", "postgresql://secret-of-the-fleet")
        patch.setenv("KQUEUE_LOG_LEVEL", "DEBUG")
        yield


@pytest.fixture(scope="module")
def judge_environment() -> Iterator[None]:
    """Environment of this module's judges: Triton's interpreter, one thread, and variables hidden from candidates."""
    with _environment():
        yield


@pytest.fixture(scope="session")
def local() -> Iterator[LocalJudge]:
    """Start a judge on the CPU, without a queue."""
    with tempfile.TemporaryDirectory(prefix="kqueue-test-") as name:
        Path(name).chmod(0o711)  # pytest's folders are closed to candidates
        with LocalJudge("cpu", config=load(scratch=Path(name))) as judge:
            yield judge


@pytest.fixture(scope="session")
def rig() -> Iterator[Rig]:
    """A slot on the CPU, with a fork server that has the judges' environment."""
    from tests.judge.rig import Rig

    with _environment():
        made = Rig()
    with made:
        yield made


@pytest.fixture(scope="session")
def keeping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A slot on the CPU that keeps references, candidates and builds."""
    from tests.judge.rig import Rig

    with _environment():
        made = Rig(keeps=True, builds=tmp_path_factory.mktemp("builds"))
    with made:
        yield made


@pytest.fixture(scope="module")
def gpu() -> str:
    from workers.judge.gpu.devices import devices

    gpus = devices()
    if not gpus and not os.environ.get("KQUEUE_REQUIRE_GPU"):
        pytest.skip("there is no GPU here")
    return gpus[0].uuid


@pytest.fixture(scope="module")
def gpu_rig(gpu: str, judge_environment: None) -> Iterator[Rig]:
    """A slot on the first GPU."""
    from tests.judge.rig import Rig

    with Rig(gpu) as rig:
        yield rig
