"""Packages that register parts of kqueue, and programs that find them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from kqueue import backends


def install(
    folder: Path, name: str, value: str, source: str, package: str = "third", group: str = backends.GROUP
) -> None:
    """Write a package with a backend, or with a part of another group, to a folder, as an installer does."""
    about = folder / f"{package}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
    (folder / f"{package}.py").write_text(source)


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run a program that finds the folder's packages."""
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{Path(backends.__file__).parents[2]}"}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
