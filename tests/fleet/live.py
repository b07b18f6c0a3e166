"""A complete fleet on the `cpu` lane with real judges, for tests that submit kernels."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kqueue.config import load
from kqueue.errors import LocalFleetError
from kqueue.local.fleet import LocalFleet
from tests.services import with_schema


@contextmanager
def live_fleet(*, http: bool = False, slots: int = 2) -> Iterator[LocalFleet]:
    """Run a fleet that reuses no verdict. Without its programs skip the test, or fail it in CI."""
    with tempfile.TemporaryDirectory(prefix="kqueue-test-") as name:
        root = Path(name)
        root.chmod(0o711)  # candidates cannot enter pytest's folders
        config = load(
            home=root / "home", scratch=root / "scratch", gpus="none", cpu_slots=slots, reuse=False, probe_share=0
        )
        (root / "home").mkdir(mode=0o700)
        with_schema(root / "home" / "postgres")
        try:
            running = LocalFleet(config, durable=False, http=http).start()
        except LocalFleetError as error:
            if os.environ.get("CI"):
                raise
            pytest.skip(str(error))
        try:
            yield running
        finally:
            running.stop()
