"""A judge for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.judge import loopback
from tests.judge.rig import Rig


@pytest.fixture(autouse=True)
def _end_loopbacks() -> Iterator[None]:
    """Ends the references that a test runs in threads of its own."""
    yield
    while loopback.running:
        loopback.running.pop().close()


@pytest.fixture(scope="module")
def judge_environment() -> Iterator[None]:
    """The environment of this module's judges: Triton's interpreter, one thread, a secret that none may see."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("KQUEUE_DATABASE_URL", "postgresql://secret-of-the-fleet")
        yield


@pytest.fixture(scope="module")
def rig(judge_environment: None) -> Iterator[Rig]:
    """A place on the CPU, with a fork server of its own."""
    with Rig() as rig:
        yield rig
