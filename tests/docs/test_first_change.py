"""The diffs in docs/first-change.md: the category's is applied and works, the backend's is the code."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CATEGORY, BACKEND = re.findall(r"(?ms)^```\n(.*?)^```$", (ROOT / "docs" / "first-change.md").read_text())


def changes(block: str) -> list[tuple[Path, str, str]]:
    """Return the file, the old lines and the new lines of each change in a diff."""
    found = re.findall(r"^(\w\S*)\n((?:[ +-].*\n|\+\n)+)", block, re.MULTILINE)
    return [
        (Path(path), *(re.sub(rf"^(?:[{drop}].*\n|.)", "", body, flags=re.M) for drop in "+-")) for path, body in found
    ]


@pytest.fixture
def changed(tmp_path: Path) -> Path:
    """Return a copy of the code with the category's diff, each change of which fits one place."""
    for name in ("kqueue", "workers", "examples", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for path, old, new in changes(CATEGORY):
        text = (tmp_path / path).read_text()
        assert not old or text.count(old) == 1, (path, old)
        (tmp_path / path).write_text(text.replace(old, new) if old else text + new)
    return tmp_path


def test_the_diffs_fit_the_code(changed: Path) -> None:
    """Each place of the category's diff is in its file once, and all lines of the backend's."""
    for path, _, new in changes(BACKEND):
        assert set(new.splitlines()) <= set((changed / path).read_text().splitlines()), path


@pytest.mark.nightly
def test_the_category_works(changed: Path) -> None:
    """The new test passes, and so do the tests that the page names."""
    tests = ("tests/test_evidence.py", "tests/examples/test_gallery.py", "tests/judge/test_messages.py")
    command = [sys.executable, "-m", "pytest", "-q", "-k", "cuda_code or test_evidence or every_category", *tests]
    subprocess.run(command, cwd=changed, env=os.environ | {"PYTHONPATH": str(changed)}, check=True)
