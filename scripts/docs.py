"""`make docs`: write the generated parts of the documents. With `--check` only say which are out of date.

Generated are `docs/categories.md` as a whole, and the table of commands in `docs/cli.md`, which stands between two
comments. Both come from the code. Exit status: 0, or with `--check` 1 where a document is out of date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = re.compile(r"(<!-- commands: [^\n]* -->\n).*?(<!-- end of commands -->)", re.DOTALL)
HEADING = re.compile(r"^## ([a-z, ]+)$", re.MULTILINE)


def commands(command: Any, *path: str) -> Iterator[tuple[str, str]]:
    """Return the words and the first sentence of the help of every command below ``command``, a command of Click's."""
    below = getattr(command, "commands", None)
    if below is None:
        yield " ".join(path), command.get_short_help_str(limit=1000)
        return
    for name, child in below.items():
        yield from commands(child, *path, name)


def command_table(document: str) -> str:
    """Return the table of all commands; each links to the section of ``document`` that names it, if there is one."""
    from kqueue.cli import app

    sections = {
        name: heading.replace(",", "").replace(" ", "-")
        for heading in HEADING.findall(document)
        for name in heading.split(", ")
    }
    lines = ["| command | what it does |", "|---|---|"]
    for words, help_text in commands(typer.main.get_command(app)):
        shown = f"`kqueue {words}`"
        section = sections.get(words.split()[0])
        lines.append(f"| {f'[{shown}](#{section})' if section else shown} | {help_text} |")
    return "\n".join(lines) + "\n"


def documents() -> dict[Path, str]:
    """Return every document with a generated part, as it should be."""
    from kqueue import categories

    cli = ROOT / "docs" / "cli.md"
    text = cli.read_text()
    if COMMANDS.search(text) is None:
        raise SystemExit(f"{cli} has no place for the table of commands")
    return {
        ROOT / "docs" / "categories.md": categories.markdown(),
        cli: COMMANDS.sub(lambda found: found[1] + command_table(text) + found[2], text),
    }


def main() -> int:
    """Write what has changed, or name it."""
    check = sys.argv[1:] == ["--check"]
    stale = {path: text for path, text in documents().items() if path.read_text() != text}
    for path, text in stale.items():
        if check:
            print(f"{path.relative_to(ROOT)} is out of date: run `make docs`")
        else:
            path.write_text(text)
            print(f"{path.relative_to(ROOT)} written")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
