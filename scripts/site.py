"""Hooks of mkdocs for `make site`.

Documents link to files of the repository outside of `docs/` (`../README.md`, `../kqueue/store/roles.py`). On the site
these are pages and files below `repository/`, so that each link works without a network. Headings get GitHub's anchors,
because links in the documents use them.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parent.parent
#: The site's folder for files of the repository outside of `docs/`.
BELOW = "repository"
#: The target of a link or a picture in Markdown.
LINK = re.compile(r"(\]\()(<?)([^)\s>#]+)((?:#[\w-]*)?>?\))")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)


def on_config(config: Any) -> Any:
    """Give headings the anchors that GitHub gives them."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the files to which documents link, directly or through other added pages."""
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
    """Return a page with links to their targets on the site. A link to a folder leads to a README."""
    here = page.file.src_uri
    source = ROOT / here.removeprefix(f"{BELOW}/") if here.startswith(f"{BELOW}/") else ROOT / "docs" / here

    def moved(found: re.Match[str]) -> str:
        target = resolved(found[3], source.parent)
        if target is None:
            return found[0]
        if target.is_dir():
            target = target / "README.md" if (target / "README.md").exists() else ROOT / "README.md"
        return found[1] + found[2] + posixpath.relpath(location(target), posixpath.dirname(here) or ".") + found[4]

    parts: list[str] = []
    at = 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(moved, markdown[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, LINK.sub(moved, markdown[at:])])


def location(target: Path) -> str:
    """Return the path on the site of a file of the repository."""
    if target.is_relative_to(ROOT / "docs"):
        return target.relative_to(ROOT / "docs").as_posix()
    return f"{BELOW}/{target.relative_to(ROOT).as_posix()}"


def targets(text: str, folder: Path) -> list[Path]:
    """Return the files of the repository that a document's links name."""
    paths = [resolved(link[2], folder) for link in LINK.findall(FENCE.sub("", text))]
    return [path for path in paths if path is not None]


def resolved(link: str, folder: Path) -> Path | None:
    """Return the file that a relative link names, or None for a URL and for a missing file."""
    if re.match(r"[a-z]+:|/", link):
        return None
    path = (folder / link).resolve()
    return path if path.exists() and path.is_relative_to(ROOT) else None
