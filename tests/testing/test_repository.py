"""Selection of a repository's files that are sent to a fleet's hosts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kqueue import trees
from kqueue.errors import ConfigError
from workers.judge.candidate.archive import unpack


def write(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", folder, *words], check=True, capture_output=True)


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def travelled(root: Path, tmp_path: Path) -> Path:
    there = tmp_path / "there"
    unpack(trees.packed_tests(root), there)
    return there


@pytest.mark.parametrize("known", [True, False], ids=["Git", "no Git"])
def test_links_are_kept(tmp_path: Path, known: bool) -> None:
    """Links to files and folders stay links. An outside file is copied, and a broken link is left out."""
    root = tmp_path / "project"
    write(root, "data/a.txt")
    write(tmp_path, "outside.txt", "away/b.txt")
    links = {
        "folder": "data", "file": "data/a.txt", "out": "../outside.txt", "away": "../away", "loop": "loop", "x": "y",
    }  # fmt: skip
    for name, target in links.items():
        (root / name).symlink_to(target)
    if known:
        git(tmp_path, "init", "-q", "project")
    there = travelled(root, tmp_path)
    assert names(there) == ["data", "file", "folder", "out"]
    assert (there / "folder").readlink() == Path("data")
    assert (there / "folder/a.txt").read_text() == "data/a.txt"
    assert (there / "file").readlink() == Path("data/a.txt")
    assert (there / "out").read_text() == "outside.txt"
    assert not (there / "out").is_symlink()


@pytest.mark.parametrize("known", [True, False], ids=["Git", "no Git"])
def test_a_repository_within_has_its_own_word(tmp_path: Path, known: bool) -> None:
    """The inner repository's ignored files are not sent, whether or not an outer repository contains it."""
    root = tmp_path / "project"
    write(
        root, "a.txt", "inner/.env", "inner/b.txt", "inner/.github/c.txt", "venv/pyvenv.cfg" if not known else "d.txt"
    )
    (root / "inner/.gitignore").write_text(".env\n")
    git(root, "init", "-q", "inner")
    if known:
        git(tmp_path, "init", "-q", "project")
    there = travelled(root, tmp_path)
    assert names(there / "inner") == [".github", ".gitignore", "b.txt"]
    assert not (there / "venv").exists()
    assert (there / "a.txt").exists()


@pytest.mark.parametrize("broken", ["refused", "missing"])
def test_a_repository_that_git_does_not_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """The error has git's message, and no ignored file, such as credentials, is sent."""
    git(tmp_path, "init", "-q", "project")
    inside = tmp_path / "project/tests"
    write(inside, ".env")
    if broken == "missing":
        monkeypatch.setenv("PATH", str(tmp_path))
        words = "No such file"
    else:
        (tmp_path / "bin").mkdir()
        program = tmp_path / "bin/git"
        program.write_text("#!/bin/sh\necho 'fatal: detected dubious ownership' >&2\nexit 128\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        words = "dubious ownership"
    for asked in (trees.find, trees.packed_tests):
        with pytest.raises(ConfigError, match=words):
            asked(inside)
