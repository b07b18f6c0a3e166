"""`make docs`: write the generated parts of the documents. With `--check` only list the outdated documents.

`docs/categories.md`, `docs/evidence.md` and `docs/settings.md` are generated as a whole, and five documents have a
generated part between comments: the commands in `docs/cli.md`, the routes in `docs/http.md`, the names in
`docs/python.md`, the static rules and the backends in `docs/kernels.md`, and the columns in `docs/export.md`. The exit
status is 0, or 1 if `--check` finds an outdated document.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reference
import typer.main
import words

ROOT = Path(__file__).resolve().parent.parent
HEADING = re.compile(r"^## ([a-z, ]+)$", re.MULTILINE)
#: Link of a command without a section to another page, which stays.
LINK = re.compile(r"\[`kqueue ([a-z ]+)`\]\(([a-z-]+\.md[^)]*)\)")


def commands(command: Any, *path: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the first sentence of the help of every command below ``command``, a Click command."""
    below = getattr(command, "commands", None)
    if below is None:
        yield " ".join(path), command.get_short_help_str(limit=1000)
        return
    if path and command.invoke_without_command:
        yield " ".join(path), command.get_short_help_str(limit=1000)
    for name in command.list_commands(context := command.context_class(command)):
        yield from commands(command.get_command(context, name), *path, name)


def command_table(document: str) -> str:
    """Return the list of all commands, with links to the sections of ``document`` that name them."""
    from kqueue.cli import app

    pages = dict(LINK.findall(document))
    for names in HEADING.findall(document):
        pages |= dict.fromkeys(names.split(", "), f"#{names.replace(',', '').replace(' ', '-')}")
    lines = commands(typer.main.get_command(app))
    links = ((name, pages.get(name.split()[0]) or pages[name], text) for name, text in lines)
    return "".join(f"{reference.listed(f'[`kqueue {name}`]({link})', '', text)}\n" for name, link, text in links)


def rule_table() -> str:
    """Return the list of the static rules."""
    from workers.judge.pipeline.findings import RULES

    return "".join(f"- `{rule}` ({severity}): {meaning}\n" for rule, (severity, meaning) in RULES.items())


def backend_table() -> str:
    """Return the table of the backends that kqueue brings."""
    from kqueue.backends import registered

    lines = ["| backend | description | needs | lanes |", "|---|---|---|---|"]
    for backend in registered().values():
        needs = ", ".join(f"`{name}`" for name in (*backend.modules, *backend.compilers)) or "torch"
        lanes = (
            "`gpu`, `cpu` through Triton's interpreter"
            if backend.triton
            else "`gpu`, `cpu`"
            if backend.cpu
            else "`gpu`"
        )
        lines.append(f"| `{backend.name}` | {backend.description} | {needs} | {lanes} |")
    return "\n".join(lines) + "\n"


def fill(document: str, name: str, table: str) -> str:
    """Return ``document`` with ``table`` between the comments around the block ``name``."""
    block = re.compile(rf"(<!-- {name}: [^\n]* -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    if len(block.findall(document)) != 1:
        raise SystemExit(f"a document must have exactly one block for the table of {name}")
    return block.sub(lambda found: found[1] + table + found[2], document)


def documents() -> dict[Path, str]:
    """Return the correct text of every document with a generated part."""
    from kqueue import categories
    from kqueue.cli.categories import page
    from kqueue.features.export.dataset import columns_table

    docs = ROOT / "docs"
    names = ("cli.md", "http.md", "python.md", "kernels.md", "export.md")
    cli, http, python, kernels, export = ((docs / name).read_text() for name in names)
    return {
        docs / "categories.md": categories.markdown() + words.words(),
        docs / "evidence.md": page(),
        docs / "settings.md": reference.settings(),
        docs / "http.md": fill(http, "routes", reference.routes()),
        docs / "cli.md": fill(cli, "commands", command_table(cli)),
        docs / "python.md": fill(python, "names", reference.python()),
        docs / "kernels.md": fill(fill(kernels, "rules", rule_table()), "backends", backend_table()),
        docs / "export.md": fill(export, "columns", columns_table()),
    }


def main() -> int:
    """Write the outdated documents, or list them with `--check`."""
    sys.path.insert(0, str(ROOT))  # the packages of this checkout
    check = sys.argv[1:] == ["--check"]
    stale = {path: text for path, text in documents().items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        if check:
            print(f"{path.relative_to(ROOT)} is out of date: run `make docs`")
        else:
            path.write_text(text)
            print(f"{path.relative_to(ROOT)} written")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
