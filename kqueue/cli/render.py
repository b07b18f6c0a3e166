"""The output of commands: text that is safe for a terminal (:mod:`kqueue.text`), JSON lines, and tables."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from kqueue.figures import age, budget, finding, gib, milliseconds, moment, provenance, ratio, step, yes_no
from kqueue.text import one_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

#: Commands import all of their output functions from this module.
__all__ = [
    "age",
    "budget",
    "category_text",
    "console",
    "drop_output",
    "finding",
    "gib",
    "milliseconds",
    "moment",
    "print_table",
    "provenance",
    "ratio",
    "say",
    "step",
    "text",
    "write_json",
    "yes_no",
]

_STYLES: Final = {"none": "green", "candidate": "red", "problem": "magenta", "fleet": "yellow", "nobody": "dim"}


def say(value: object) -> None:
    """Print one line to stderr with the prefix `kqueue`."""
    print(f"kqueue: {one_line(value)}", file=sys.stderr, flush=True)


def write_json(record: Mapping[str, Any]) -> None:
    """Print one record as one line of ASCII JSON, and flush."""
    print(json.dumps(record, ensure_ascii=True, default=str).replace("\x7f", "\\u007f"), flush=True)


def drop_output() -> None:
    """Discard all further output. The rest of the buffer would otherwise be written again at exit, and fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def console(*, stderr: bool = False) -> Console:
    """Return a console that interprets no markup and no emoji, and highlights nothing."""
    from rich.console import Console

    # Without a terminal the width is unknown. The default of 80 columns is too few for tables.
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else 200
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False, width=width, soft_wrap=False)


def text(value: object, style: str = "") -> Text:
    """Return a cell of a table: one clean line without markup."""
    from rich.text import Text

    return Text(one_line(value), style=style)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "") -> None:
    """Print a table.

    Args:
        columns: names of the columns. Times and counts are aligned to the right.
        rows: cells of each row. A :class:`rich.text.Text` is printed unchanged, None as an empty cell, and any other
            value by :func:`text`.
        title: the title, or an empty string for none.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left", pad_edge=False)
    for column in columns:
        numeric = column.endswith((" ms", " s")) or column in {"n", "speedup", "attempts"}
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else text("" if cell is None else cell) for cell in row))
    console().print(table)


def category_text(category: str, blame: str) -> Text:
    """Return a category in the colour of its blame."""
    return text(category, _STYLES.get(blame, ""))
