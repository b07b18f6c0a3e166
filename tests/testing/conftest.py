"""A project to run tests of."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import Cli
from tests.testing.projects import LIMIT_S


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """The command in a folder of its own, with no plugin of pytest but kqueue's, and devices of its own."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "KQUEUE_SCRATCH": str(tmp_path / "scratch"), "COLUMNS": "120"}
    environment["PYTEST_ADDOPTS"] = ""  # of the pytest that runs these tests
    return Cli(folder, environment, patience_s=LIMIT_S)
