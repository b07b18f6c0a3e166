"""Files and headings in links of documents exist, and so do documents that the code names."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Names of folders that do not belong to the project. Folders that begin with a dot do not either.
FOREIGN = {"wheelhouse", "dist", "build", "node_modules"}
FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")
HEADING = re.compile(r"^#{1,6} +(.+?)(?: +#+)?$", re.MULTILINE)
#: A file or folder of the repository in a document.
PLACE = re.compile(r"`((?:kqueue|workers|migrations|tests|scripts|benchmarks|examples|docs)/[\w./-]*)`")
#: A document, with or without a heading, in a program.
NAMED = re.compile(r"\b((?:docs/[\w-]+|README|CONTRIBUTING|SECURITY|CHANGELOG)\.md(?:#[\w-]+)?)")
PROGRAMS = {".py", ".toml", ".yml", ".sh", ".html", ".ini", ".mako"}


def files() -> list[Path]:
    """Return the repository's files."""
    found: list[Path] = []
    todo = [ROOT]
    while todo:
        for path in sorted(todo.pop().iterdir()):
            if path.name in FOREIGN or path.name.startswith(".") or path.name == "__pycache__" or path.is_symlink():
                continue
            if path.is_dir():
                todo.append(path)
            else:
                found.append(path)
    return found


DOCUMENTS = [path for path in files() if path.suffix == ".md"]


@cache
def anchors(document: Path) -> frozenset[str]:
    """Return GitHub's anchors of a document's headings."""
    seen: dict[str, int] = {}
    found: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", document.read_text())):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")
        number = seen[slug] = seen.get(slug, -1) + 1
        found.add(f"{slug}-{number}" if number else slug)
    return frozenset(found)


def missing(target: str, document: Path) -> str | None:
    """Return the missing part of a link's target, or None."""
    name, _, anchor = target.partition("#")
    path = (document.parent / name).resolve() if name else document
    if not path.exists():
        return f"{target}: there is no {name}"
    if anchor and path.suffix == ".md" and anchor not in anchors(path):
        return f"{target}: {path.name} has no such heading"
    return None


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_document_points_at_exists(document: Path) -> None:
    """Relative links, and paths in backticks below the project's folders, resolve."""
    text = FENCE.sub("", document.read_text())
    relative = [target for target in LINK.findall(CODE.sub("", text)) if not re.match(r"[a-z]+:", target)]
    assert [fault for target in relative if (fault := missing(target, document))] == []
    assert [name for name in PLACE.findall(text) if not (ROOT / name).exists()] == []


def test_documents_that_programs_name_exist() -> None:
    """Documents that docstrings, comments and messages name exist."""
    programs = [path for path in files() if path.suffix in PROGRAMS or path.name in {"Makefile", "Dockerfile"}]
    assert len(programs) > 200
    named = {(path, target) for path in programs for target in NAMED.findall(path.read_text(errors="replace"))}
    assert [(path, fault) for path, target in named if (fault := missing(target, ROOT / "README.md"))] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_are_words(document: Path) -> None:
    """No link to a document shows the name of a file."""
    assert re.findall(r"\[`?[\w/.-]+\.md(?:#[\w-]+)?`?\]\([^)]*\)", FENCE.sub("", document.read_text())) == []
