"""Hooks of mkdocs for `make site`.

Documents link to files of the repository beside `docs/` (`../README.md`, `../kqueue/store/roles.py`). On the site those
are pages and files below `repository/`, so that each link leads somewhere without a network. Headings get the anchors
that GitHub gives them, since that is what links in the documents name.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parent.parent
#: Where the repository's own files lie on the site.
BELOW = "repository"
#: A link's or a picture's target in Markdown.
LINK = re.compile(r"(\]\()(<?)([^)\s>#]+)((?:#[\w-]*)?>?\))")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)


def on_config(config: Any) -> Any:
    """Have headings named as GitHub names them."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add what documents link to, and what the pages among that link to."""
    todo = [(ROOT / "docs", file.src_uri) for file in files.documentation_pages()]
    while todo:
        base, name = todo.pop()
        for target in targets((base / name).read_text(), (base / name).parent):
            inside = f"{BELOW}/{target.relative_to(ROOT).as_posix()}"
            if target.is_relative_to(ROOT / "docs") or target.is_dir() or files.get_file_from_path(inside):
                continue
            files.append(File.generated(config, inside, abs_src_path=str(target)))
            if target.suffix == ".md":
                todo.append((ROOT, target.relative_to(ROOT).as_posix()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point a page's links to where their targets are on the site. Folders have no page: their links become text."""
    here = page.file.src_uri
    source = ROOT / here.removeprefix(f"{BELOW}/") if here.startswith(f"{BELOW}/") else ROOT / "docs" / here

    def moved(found: re.Match[str]) -> str:
        target = resolved(found[3], source.parent)
        if target is None:
            return found[0]
        if target.is_dir():
            target = target / "README.md" if (target / "README.md").exists() else ROOT / "README.md"
        return found[1] + found[2] + posixpath.relpath(place(target), posixpath.dirname(here) or ".") + found[4]

    parts: list[str] = []
    at = 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(moved, markdown[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, LINK.sub(moved, markdown[at:])])


def place(target: Path) -> str:
    """Where a file of the repository is on the site."""
    if target.is_relative_to(ROOT / "docs"):
        return target.relative_to(ROOT / "docs").as_posix()
    return f"{BELOW}/{target.relative_to(ROOT).as_posix()}"


def targets(text: str, folder: Path) -> list[Path]:
    """The files of the repository that a document's links name."""
    found = [resolved(link[2], folder) for link in LINK.findall(FENCE.sub("", text))]
    return [path for path in found if path is not None]


def resolved(link: str, folder: Path) -> Path | None:
    """The file that a relative link names; None for an address, and for what is not there."""
    if re.match(r"[a-z]+:|/", link):
        return None
    path = (folder / link).resolve()
    return path if path.exists() and path.is_relative_to(ROOT) else None
