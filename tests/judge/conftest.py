"""A judge for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import Server
from tests.judge.rig import Rig


@pytest.fixture(scope="module")
def rig(server: Server) -> Iterator[Rig]:
    """A CPU slot with a fork server and a database of its own."""
    patch = pytest.MonkeyPatch()
    patch.setenv("TRITON_INTERPRET", "1")
    patch.setenv("OMP_NUM_THREADS", "1")
    patch.setenv("KQUEUE_DATABASE_URL", "postgresql://secret-of-the-fleet")
    url = server.clone()
    try:
        with Rig(url) as rig:
            yield rig
    finally:
        patch.undo()
        server.drop(url)
