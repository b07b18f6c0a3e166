"""The packages that kqueue's processes import, in a checkout and in a wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("layout", ["checkout", "wheel"])
def test_a_user_s_packages_do_not_replace_those_of_kqueue(layout: str, tmp_path: Path) -> None:
    """A started module gets kqueue's own packages, whatever PYTHONPATH and the working directory hold."""
    own = ROOT
    if layout == "wheel":
        own = tmp_path / "site-packages"
        target = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
        (own / "kqueue").mkdir(parents=True)
        for path in (ROOT / "kqueue").iterdir():
            (own / "kqueue" / path.name).symlink_to(path)
        for package in set(target["only-include"]) - {"kqueue"}:
            (own / target["sources"][package]).symlink_to(ROOT / package)
    for package in ("kqueue", "workers", "migrations"):
        (tmp_path / "user" / package).mkdir(parents=True)
        (tmp_path / "user" / package / "__init__.py").write_text("raise ImportError('a user s package')")
    shown = "import kqueue.program, workers.slot as w; print(w.__file__, kqueue.program.folder('migrations'))"
    out = subprocess.run(
        [sys.executable, "-P", own / "kqueue" / "program.py", "timeit", "-n", "1", "-r", "1", shown],
        cwd=tmp_path / "user", env={**os.environ, "PYTHONPATH": "."}, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    base = own / "kqueue" if layout == "wheel" else own
    assert out.split()[:2] == [str(base / "workers" / "slot.py"), str(base / "migrations")]
