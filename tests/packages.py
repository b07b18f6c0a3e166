"""The packages that `make adapters` installs. They come last on the path, after installed packages."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[1]
ADAPTERS_FOLDER = str(_ROOT / ".adapters")
#: NeMo-Gym, OpenEnv and their requirements, some of which are older than those in :data:`ADAPTERS_FOLDER`.
NEMO_GYM_FOLDER = str(_ROOT / ".nemo-gym")
sys.path.append(ADAPTERS_FOLDER)


def needs(package: str, folder: str | None = None) -> None:
    """Skip the test if a package is neither on the path nor in the folder. Under `make adapters`, fail it."""
    if PathFinder.find_spec(package, folder and [folder]) is None:
        missing = f"{package} is not here: `make adapters` fetches it"
        pytest.fail(missing) if os.environ.get("KQUEUE_REQUIRE_ADAPTERS") else pytest.skip(missing)
