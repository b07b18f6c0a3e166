"""What documents point at exists: files, headings, and the documents that the code names."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Folders that are not the project's, by name; those that begin with a dot are not either.
FOREIGN = {"wheelhouse", "dist", "build", "node_modules"}
FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")
HEADING = re.compile(r"^#{1,6} +(.+?)(?: +#+)?$", re.MULTILINE)
#: A file or folder of the repository, as documents name it.
PLACE = re.compile(r"`((?:kqueue|workers|migrations|tests|scripts|benchmarks|examples|docs)/[\w./-]*)`")
#: A document that a program names, with a heading of it or without.
NAMED = re.compile(r"\b((?:docs/[\w-]+|README|CONTRIBUTING|SECURITY|CHANGELOG)\.md(?:#[\w-]+)?)")
PROGRAMS = {".py", ".toml", ".yml", ".sh", ".html", ".ini", ".mako"}


def files() -> list[Path]:
    """The repository's own files."""
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
    """What links may name after `#`, as GitHub makes it from headings."""
    seen: dict[str, int] = {}
    found: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", document.read_text())):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")
        number = seen[slug] = seen.get(slug, -1) + 1
        found.add(f"{slug}-{number}" if number else slug)
    return frozenset(found)


def missing(target: str, document: Path) -> str | None:
    """Say what a link's target lacks; None if it resolves."""
    name, _, anchor = target.partition("#")
    path = (document.parent / name).resolve() if name else document
    if not path.exists():
        return f"{target}: there is no {name}"
    if anchor and path.suffix == ".md" and anchor not in anchors(path):
        return f"{target}: {path.name} has no such heading"
    return None


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_document_points_at_exists(document: Path) -> None:
    """Each relative link names a file and a heading of it; a path in backticks below a folder of ours is there."""
    text = FENCE.sub("", document.read_text())
    relative = [target for target in LINK.findall(CODE.sub("", text)) if not re.match(r"[a-z]+:", target)]
    assert [fault for target in relative if (fault := missing(target, document))] == []
    assert [name for name in PLACE.findall(text) if not (ROOT / name).exists()] == []


def test_documents_that_programs_name_exist() -> None:
    """A docstring, a comment or a message that refers to a document refers to one that is there."""
    programs = [path for path in files() if path.suffix in PROGRAMS or path.name in {"Makefile", "Dockerfile"}]
    assert len(programs) > 200
    named = {(path, target) for path in programs for target in NAMED.findall(path.read_text(errors="replace"))}
    assert [(path, fault) for path, target in named if (fault := missing(target, ROOT / "README.md"))] == []
