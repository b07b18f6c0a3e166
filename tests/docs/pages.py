"""Pages for readers, their code blocks, and their inline code."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
#: Languages whose blocks are run, unless the line before has a reason against it.
RUN = ("sh", "python", "sql")
#: Languages whose blocks are only parsed. A block without a language is a program's output or a drawing.
READ = ("json", "yaml", "toml", "ini", "mermaid", "")
#: A block with the reason against running it, if there is one.
BLOCK = re.compile(r"(?:<!-- not run: ([^>]+) -->\n)?^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
#: Code within a line.
WORDS = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block. ``reason`` is the reason against running it, or empty."""

    page: str
    line: int
    language: str
    text: str
    reason: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def runs(self) -> bool:
        """Return whether a test runs it."""
        return self.language in RUN and not self.reason


def name(page: Path) -> str:
    """Return a page's path from the root."""
    return page.relative_to(ROOT).as_posix()


def blocks_in(text: str, page: str) -> list[Block]:
    """Return the blocks of a page's text in their order."""
    return [
        Block(page, text.count("\n", 0, found.start(2)) + 1, found[2], found[3], found[1] or "")
        for found in BLOCK.finditer(text)
    ]


def words_in(text: str) -> list[str]:
    """Return the code within a text's lines, each on one line."""
    return [" ".join(words.replace(r"\|", "|").split()) for _, words in WORDS.findall(BLOCK.sub("", text))]


BLOCKS = [block for page in PAGES for block in blocks_in(page.read_text(), name(page))]
