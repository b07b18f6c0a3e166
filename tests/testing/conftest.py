"""A project with tests to run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import Cli
from tests.testing.projects import LIMIT_S


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Return the command in a new folder, with kqueue's pytest plugin only and devices that no other test locks."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "KQUEUE_SCRATCH": str(tmp_path / "scratch"), "COLUMNS": "120"}
    environment["PYTEST_ADDOPTS"] = ""  # the settings of this pytest run
    return Cli(folder, environment, patience_s=LIMIT_S)
