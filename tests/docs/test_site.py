"""The site has every page once, needs no foreign server, and is built where its packages are (`make site`)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def pages(part: Any) -> list[str]:
    """Return the pages below a part of the navigation in their order."""
    if isinstance(part, str):
        return [part]
    parts = part.values() if isinstance(part, dict) else part
    return [page for below in parts for page in pages(below)]


def test_the_navigation_is_whole() -> None:
    """It has each page once, its files from outside docs/ exist, nothing is foreign, and docs/ keeps to its size."""
    listed = pages(SETTINGS["nav"])
    beside = [page.removeprefix("repository/") for page in listed if page.startswith("repository/")]
    assert "README.md" in beside
    assert [name for name in beside if not (ROOT / name).is_file()] == []
    own = sorted(page for page in listed if not page.startswith("repository/"))
    words = {path.name: len(path.read_text().split()) for path in (ROOT / "docs").glob("*.md")}
    assert own == sorted(words)
    assert (len(own) <= 35, sum(words.values()) <= 90_000) == (True, True), "join pages on one subject, and cut"
    assert SETTINGS["theme"]["font"] is False
    # Without its own polyfill the plugin `offline` would name one on another server.
    assert SETTINGS["plugins"] == ["search", "offline"]
    own = [*SETTINGS["extra"].pop("polyfills"), *SETTINGS["extra_css"], SETTINGS["theme"]["logo"]]
    assert any("iframe-worker" in name for name in own)
    assert [name for name in own if not (ROOT / "docs" / name).is_file()] == []
    assert not SETTINGS["extra"]
    assert "extra_javascript" not in SETTINGS


@pytest.mark.nightly
def test_the_site_is_built(tmp_path: Path) -> None:
    """No link is broken, and no page loads a script, a style or a picture from another server."""
    if not (ROOT / ".site" / "mkdocs").exists():
        pytest.skip("`make site` has not fetched mkdocs")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / ".site"), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    made = list(tmp_path.rglob("*.html"))
    assert len(made) >= len(pages(SETTINGS["nav"]))
    foreign = re.compile(r"""<(?:script|img|link[^>]*rel="?stylesheet"?)[^>]*(?:src|href)=["']?(?:https?:)?//""")
    assert [page.name for page in made if foreign.search(page.read_text())] == []
