"""One live fleet on the `cpu` lane for all tests of the integrations, and small, quick kernels."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kqueue import Client
from kqueue.config import Config
from kqueue.local.fleet import LocalFleet
from tests.fleet.live import live_fleet
from tests.services import starts_services

#: Whether a missing package for adapters fails the tests.
REQUIRED = bool(os.environ.get("KQUEUE_REQUIRE_ADAPTERS"))
# Last, so that installed packages take precedence.
sys.path.append(str(Path(__file__).resolve().parents[2] / ".adapters"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Raise the timeout of every test: the first one starts the fleet, which takes minutes on a busy machine."""
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
@starts_services
def fleet() -> Iterator[LocalFleet]:
    """Start the fleet."""
    with live_fleet() as running:
        yield running


@pytest.fixture
def config(fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Return the fleet's settings, also set in the environment."""
    for name, value in fleet.config.environment().items():
        monkeypatch.setenv(name, value)
    return fleet.config


@pytest.fixture
def kq(config: Config) -> Iterator[Client]:
    """Return a client of the fleet."""
    with Client(config) as client:
        yield client


@pytest.fixture(scope="session")
def needs() -> Callable[[str], None]:
    """Skip the test if a package of `make adapters` is missing. Under `make adapters`, fail it."""

    def look(package: str) -> None:
        if importlib.util.find_spec(package) is None:
            missing = f"{package} is not here: `make adapters` fetches it"
            pytest.fail(missing) if REQUIRED else pytest.skip(missing)

    return look


@pytest.fixture
def run_example(config: Config, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run an example against the fleet, from a folder other than its own."""
    examples = Path(__file__).resolve().parents[2] / "examples"

    def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, examples / name, *arguments],
            env=os.environ | config.environment(),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=400,
        )

    return run
