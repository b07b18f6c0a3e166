"""The requirements of the images, without a build."""

from __future__ import annotations

import subprocess
import sys
import tomllib

from tests.compose.program import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def required(extras: str) -> subprocess.CompletedProcess[str]:
    """Run the images' program that prints the requirements of kqueue with some extras."""
    command = [sys.executable, str(ROOT / "docker" / "requirements.py"), str(ROOT / "pyproject.toml"), extras]
    return subprocess.run(command, capture_output=True, text=True)


def test_images_require_what_extras_do() -> None:
    """Images require the base and their extras, including nested ones, and no more."""
    extras = PROJECT["optional-dependencies"]
    parts = {"server,http": ("server", "http", "database", "receipts", "cli"), "tune": ("tune", "plots", "cli")}
    for asked, named in parts.items():
        own = [one for name in named for one in extras[name] if not one.startswith("kqueue[")]
        assert required(asked).stdout.splitlines() == [*PROJECT["dependencies"], *own]


def test_an_unknown_extra_breaks_the_build() -> None:
    """A misspelt extra is an error."""
    done = required("server,htpp")
    assert (done.returncode, done.stdout) == (1, "")
    assert "htpp" in done.stderr
