"""The pages that people read, and the blocks and the words in code that they have."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
#: Blocks in these languages are run, unless the line before says why not.
RUN = ("sh", "python", "sql")
#: Blocks in these are read by what reads the like. A block without a language is what a program prints, or a drawing.
READ = ("json", "yaml", "ini", "mermaid", "")
#: A block, with the reason before it why it is not run, if there is one.
BLOCK = re.compile(r"(?:<!-- not run: ([^>]+) -->\n)?^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
#: Words in code within a line.
WORDS = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block. ``reason`` says why it is not run, and is empty if it is."""

    page: str
    line: int
    language: str
    text: str
    reason: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def runs(self) -> bool:
        """Whether a test runs it."""
        return self.language in RUN and not self.reason


def name(page: Path) -> str:
    """A page's path from the root."""
    return page.relative_to(ROOT).as_posix()


def blocks_in(text: str, page: str) -> list[Block]:
    """The blocks of a page's text, in their order."""
    return [
        Block(page, text.count("\n", 0, found.start(2)) + 1, found[2], found[3], found[1] or "")
        for found in BLOCK.finditer(text)
    ]


def words_in(text: str) -> list[str]:
    """What stands in code within a text's lines, each on one line."""
    return [" ".join(words.replace(r"\|", "|").split()) for _, words in WORDS.findall(BLOCK.sub("", text))]


BLOCKS = [block for page in PAGES for block in blocks_in(page.read_text(), name(page))]
