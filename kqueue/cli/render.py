"""The output of commands: text that is safe for a terminal (:mod:`kqueue.text`), records as JSON lines, tables."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from kqueue.text import one_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from kqueue.evidence import Finding, Provenance

_STYLES: Final = {"none": "green", "candidate": "red", "problem": "magenta", "fleet": "yellow", "nobody": "dim"}


def say(value: object) -> None:
    """Print one line to stderr in the name of `kqueue`."""
    print(f"kqueue: {one_line(value)}", file=sys.stderr, flush=True)


def write_json(record: Mapping[str, Any]) -> None:
    """Print one record as one line of ASCII JSON, and flush."""
    print(json.dumps(record, ensure_ascii=True, default=str).replace("\x7f", "\\u007f"), flush=True)


def drop_output() -> None:
    """Print nothing more. What the buffer still holds would otherwise be tried again, and fail, at the end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def console(*, stderr: bool = False) -> Console:
    """Return a console that interprets no markup and no emoji, and highlights nothing."""
    from rich.console import Console

    # Without a terminal the width is unknown. Tables are for reading, so 80 columns would be too few.
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
        columns: the names of the columns. Those of times and counts are aligned to the right.
        rows: the cells of each row. A :class:`rich.text.Text` is printed as it is, None as nothing, and anything else
            as :func:`text` has it.
        title: the title; none if empty.
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


def milliseconds(value: float | None) -> str:
    """Return a time with four figures; empty for None."""
    return "" if value is None else f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"


def gib(value: int) -> str:
    """Return bytes in GiB with one digit."""
    return f"{value / (1 << 30):.1f}"


def ratio(value: float | None) -> str:
    """Return a speedup, such as ``1.83x``; empty for None."""
    return "" if value is None else f"{value:.2f}x"


def yes_no(value: bool | None) -> str:
    """Return ``yes`` or ``no``; empty for None."""
    return "" if value is None else "yes" if value else "no"


def age(since: datetime) -> str:
    """Return the time since ``since`` in its largest unit: ``12s``, ``3m``, ``5h``, ``2d``."""
    seconds = max(0.0, (datetime.now(UTC) - since).total_seconds())
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


def moment(value: datetime | None) -> str:
    """Return a time in UTC to the second; empty for None."""
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
