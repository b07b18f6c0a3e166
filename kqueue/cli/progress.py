"""The progress bar of long commands: number of ended evaluations, their categories, elapsed and remaining time.

It is shown on stderr, and only on a terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kqueue.cli.render import console

if TYPE_CHECKING:
    from rich.progress import Progress


def make_bar(*, quiet: bool = False) -> Progress:
    """Return a bar of rich that disappears at its end. It is hidden if ``quiet``, or without a terminal."""
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
    """Show a bar of verdicts.

    Args:
        total: number of expected verdicts.

    Yields:
        A function to call with the category of each verdict, or with an empty string for a missing one.
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
