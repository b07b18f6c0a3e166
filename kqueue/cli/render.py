"""The output of commands: text that is safe for a terminal (:mod:`kqueue.text`), JSON lines, tables, bars, pictures.

A command builds its view, which is a dataclass or a list of them, and prints it with :func:`emit`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, TypeVar, cast

from kqueue.errors import ConfigError, InvalidRequest
from kqueue.figures import caption, milliseconds
from kqueue.text import clean, one_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.text import Text

    from kqueue.charts import Form

RowT = TypeVar("RowT")
#: The columns of a table: names, each with the function that returns the cell of a row.
Columns = Mapping[str, Callable[[RowT], object]]

#: Columns between two columns of a table.
_GAP: Final = 3
#: Minimum width of a message, whose words can be broken.
_MESSAGE: Final = 20
#: Columns that are left out of a table that is too wide, in this order, before those at its right.
_SPARED: Final = ("device", "baseline ms", "age", "backend", "problem", "runtime ms", "message")
#: Name of standard output.
STDOUT: Final = "-"
_STYLES: Final = {"none": "green", "candidate": "red", "problem": "magenta", "fleet": "yellow", "nobody": "dim"}


def say(value: object) -> None:
    """Print one line to stderr with the prefix `kqueue`."""
    print(f"kqueue: {one_line(value)}", file=sys.stderr, flush=True)


def write_json(record: Mapping[str, Any]) -> None:
    """Print one record as one line of ASCII JSON, and flush."""
    print(json.dumps(record, ensure_ascii=True, default=str).replace("\x7f", "\\u007f"), flush=True)


def drop_output(stream: IO[Any]) -> None:
    """Discard a stream's further output. The rest of its buffer would be written again at exit, and fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
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


def emit(
    view: RowT, show: Callable[[RowT], object], *, as_json: bool, record: Callable[[Any], Mapping[str, Any]] = asdict
) -> None:
    """Print a command's view, which is a dataclass or a list of rows.

    ``show`` prints it as text. With ``as_json`` it is one line of JSON, or one for each row, whose fields ``record``
    returns.
    """
    if as_json:
        for row in cast("list[Any]", view) if isinstance(view, list) else [view]:
            write_json(record(row))
    else:
        show(view)


def first(rows: Sequence[RowT], limit: int) -> list[RowT]:
    """Return the first ``limit`` rows, and print to stderr if there are more."""
    if len(rows) > limit:
        say(f"there are more than these {limit}: see --limit")
    return list(rows[:limit])


def fields(names: str) -> Columns[Any]:
    """Return the columns that show some fields of rows. A field's name declares its caption and its unit."""

    def cell(name: str) -> Callable[[Any], object]:
        return lambda row: milliseconds(getattr(row, name)) if name.endswith("_ms") else getattr(row, name)

    return {" ".join(caption(name)).strip(): cell(name) for name in names.split()}


def table(columns: Columns[RowT], *, title: str = "", empty: str = "") -> Callable[[Iterable[RowT]], None]:
    """Return a function that prints rows as a table. Without rows it prints the line ``empty``, if there is one."""

    def show(rows: Iterable[RowT]) -> None:
        if cells := [[cell(row) for cell in columns.values()] for row in rows]:
            print_table(tuple(columns), cells, title=title)
        elif empty:
            print(empty)

    return show


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "") -> None:
    """Print a table. Columns whose words do not fit in the terminal are left out, and the last line has their names.

    Columns of times and counts are aligned to the right. A :class:`rich.text.Text` is printed unchanged, None as an
    empty cell, and any other value by :func:`text`.
    """
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    cells = [[one if isinstance(one, Text) else text("" if one is None else one) for one in row] for row in rows]
    every = list(enumerate(zip(map(Text, columns), *cells, strict=True)))
    whole = {at: max(cell.cell_len for cell in column) for at, column in every}
    words = {
        at: max((cell_len(word) for cell in column for word in cell.plain.split()), default=1) for at, column in every
    }
    words |= {at: min(words[at], _MESSAGE) for at in words if columns[at] == "message"}
    out = console()
    order = [columns.index(name) for name in _SPARED if name in columns[1:]]
    order += [at for at in range(len(columns) - 1, 0, -1) if at not in order]
    while (spare := out.width - sum(words.values()) - _GAP * len(words)) < 0 and order:
        del words[order.pop(0)]
    shown = Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left", pad_edge=False)
    for at, width in words.items():
        numeric = columns[at].endswith((" ms", " s")) or columns[at] in {"n", "speedup", "attempts"}
        more = max(0, min(spare, whole[at] - width))
        spare -= more
        shown.add_column(
            columns[at], justify="right" if numeric else "left", overflow="fold", width=min(width + more, out.width)
        )
    for row in cells:
        shown.add_row(*(row[at] for at in words))
    with out.capture() as printed:
        out.print(shown)
    print("\n".join(line.rstrip() for line in printed.get().splitlines()))
    if omitted := [name for at, name in enumerate(columns) if name and at not in words]:
        out.print(f"(too narrow for: {', '.join(omitted)})")


def category_text(category: str, blame: str) -> Text:
    """Return a category in the colour of its blame."""
    return text(category, _STYLES.get(blame, ""))


def make_bar(*, quiet: bool = False) -> Progress:
    """Return a bar of rich on stderr that disappears at its end. It is hidden if ``quiet``, or without a terminal."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left", style="dim"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    return Progress(*columns, console=console(stderr=True), transient=True, disable=quiet or not sys.stderr.isatty())


@contextmanager
def progress(total: int, *, quiet: bool) -> Generator[Callable[[str], None]]:
    """Show a bar of ``total`` expected verdicts.

    Yield a function to call with the category of each verdict, or with an empty string for a missing one.
    """
    counts: dict[str, int] = {}
    with make_bar(quiet=quiet) as bar:
        task = bar.add_task("waiting", total=total)

        def advance(category: str) -> None:
            counts[category] = counts.get(category, 0) + 1
            bar.update(task, advance=1, description=counted(counts))

        yield advance


def counted(counts: Mapping[str, int]) -> str:
    """Return the number of verdicts in each category, ``passed`` first and then the most frequent."""
    order = sorted(counts, key=lambda name: (name != "passed", -counts[name], name))
    return ", ".join(f"{counts[name]} {name or 'without a verdict'}" for name in order)


def form_of(out: str | None) -> Form:
    """Return the format for the argument of ``--out``. The default, and the format of standard output, is SVG."""
    from kqueue.charts import Form

    if out is None or out == STDOUT:
        return Form.SVG
    ending = Path(out).suffix.lower().removeprefix(".")
    if ending not in list(Form):
        raise InvalidRequest(f"--out {out}: the name must end in .svg or .png")
    return Form(ending)


def write_picture(file: Path, picture: bytes) -> None:
    """Write a picture, and print its path."""
    existed = file.exists()
    try:
        file.write_bytes(picture)
    except OSError as error:
        raise ConfigError(f"--out: {file} cannot be written: {error.strerror or error}") from None
    if existed:
        say(f"{file} existed and was replaced")
    print(clean(file))
