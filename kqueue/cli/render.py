"""How the commands write: text made safe for a terminal, records as JSON lines, tables.

Sources, labels, logs and messages may come from a candidate. None of it may move the cursor, change the
terminal's title or pass for the command's own colours, so nothing of it is printed as it came.
"""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from kqueue.evidence import Finding, Provenance

#: Controls, formatting (which turns text around), surrogates, private and unassigned, other line ends.
_UNSAFE: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_STYLES: Final = {"none": "green", "candidate": "red", "problem": "magenta", "fleet": "yellow", "nobody": "dim"}


def clean(value: object) -> str:
    """``value`` as text in which only line feeds and tabs control anything; the rest is shown escaped."""
    return "".join(
        char
        if char in "\n\t" or unicodedata.category(char) not in _UNSAFE
        else char.encode("unicode_escape").decode("ascii")
        for char in str(value)
    )


def one_line(value: object) -> str:
    """:func:`clean` on one line: runs of white space become one space."""
    return " ".join(clean(value).split())


def write_json(record: Mapping[str, Any]) -> None:
    """One record as one line of JSON on stdout, ASCII only, at once."""
    print(json.dumps(record, ensure_ascii=True, default=str).replace("\x7f", "\\u007f"), flush=True)


def console(*, stderr: bool = False) -> Console:
    """A console that takes nothing for markup, emoji or a thing to colour."""
    from rich.console import Console

    # Without a terminal nobody knows the width: tables are for reading, so they are not cut at 80.
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else 200
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False, width=width, soft_wrap=False)


def text(value: object, style: str = "") -> Text:
    """A table's cell: one line, cleaned, nothing taken for markup."""
    from rich.text import Text

    return Text(one_line(value), style=style)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "") -> None:
    """A table on stdout. A cell is a :class:`rich.text.Text` or anything else, which is cleaned; None is empty.

    Columns whose name ends in a unit or counts things (``n``) are set to the right.
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
    """A category in the colour of its blame."""
    return text(category, _STYLES.get(blame, ""))


def milliseconds(value: float | None) -> str:
    """A time to four figures; empty where there is none."""
    return "" if value is None else f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"


def ratio(value: float | None) -> str:
    """A speedup, such as ``1.83x``; empty where there is none."""
    return "" if value is None else f"{value:.2f}x"


def yes_no(value: bool | None) -> str:
    """``yes``, ``no``, or empty where nothing is known."""
    return "" if value is None else "yes" if value else "no"


def age(since: datetime) -> str:
    """How long ago ``since`` was, in its largest unit: ``12s``, ``3m``, ``5h``, ``2d``."""
    seconds = max(0.0, (datetime.now(UTC) - since).total_seconds())
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


def moment(value: datetime | None) -> str:
    """A time in UTC to the second; empty where there is none."""
    return "" if value is None else value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def provenance(found: Provenance | None) -> str:
    """Return in one line whose code did the work on the GPU; empty where that is unknown."""
    if found is None:
        return ""
    libraries = [kernel.name for kernel in found.library]
    return ("decoy: " if found.decoy else "") + found.why + _some(found.own, "own") + _some(libraries, "library")


def _some(names: Sequence[str], what: str) -> str:
    """Return the first three names of kernels, shortened. The JSON form has all of them whole."""
    if not names:
        return ""
    short = [name if len(name) <= 60 else f"{name[:57]}..." for name in names[:3]]
    return f"; {what}: {', '.join(short)}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def finding(found: Finding) -> str:
    """Return a finding in one line: severity, rule, author of the rule, place, meaning and matched text."""
    place = "" if found.line is None else f", line {found.line}"
    whose = "" if found.by == "kqueue" else f" ({found.by})"
    matched = f": {found.evidence}" if found.evidence else ""
    return one_line(f"{found.severity}: {found.rule}{whose}{place}: {found.meaning}{matched}")
