"""A judge for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import Server
from tests.judge.rig import Rig


@pytest.fixture(scope="module")
def rig_database(server: Server) -> Iterator[str]:
    """A database, and the environment, for this module's judges."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("KQUEUE_DATABASE_URL", "postgresql://secret-of-the-fleet")
        url = server.clone()
        yield url
        server.drop(url)


@pytest.fixture(scope="module")
def rig(rig_database: str) -> Iterator[Rig]:
    """A CPU slot with a fork server and a database of its own."""
    with Rig(rig_database) as rig:
        yield rig
