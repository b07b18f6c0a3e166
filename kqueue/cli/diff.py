"""`kqueue diff`: two evaluations side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kqueue.cli.connection import database
from kqueue.cli.results import shown_settings

if TYPE_CHECKING:
    from rich.text import Text

    from kqueue.store.reports import Detail

_STYLES: Final = {"+": "green", "-": "red", "@": "cyan"}
_Id = Annotated[str, typer.Argument(help="An evaluation's id, or its first digits.")]


def diff(
    first: _Id,
    second: _Id,
    context: Annotated[int, typer.Option(min=0, max=10_000, help="Number of lines round each change.")] = 3,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one record with `first`, `second` and `diff`.")
    ] = False,
) -> None:
    """Show the differences between two evaluations: verdicts, times and sources."""
    from rich.text import Text

    from kqueue import differences
    from kqueue.cli.render import console, print_table, text, write_json
    from kqueue.store import reports
    from kqueue.text import clean

    with database("diff") as engine:
        pair = [reports.show(engine, reports.resolve_id(engine, name)) for name in (first, second)]
    a, b = pair
    changes = differences.of_sources(a, b, context=context)
    if as_json:
        records = [dict(_plain(detail)) for detail in pair]
        write_json({"first": records[0], "second": records[1], "diff": "\n".join(changes)})
        return
    cells = [dict(_cells(detail)) for detail in pair]
    print_table(
        ("", *(str(detail.evaluation_id)[:8] for detail in pair)),
        ((name, *(c[name] for c in cells)) for name in cells[0]),
    )
    if summary := differences.of_times(a, b):
        console().print(text(summary))
    for line in changes or ["the sources are the same"]:
        console().print(Text(clean(line), _STYLES.get(line[:1], "")), soft_wrap=True)


def _plain(detail: Detail) -> Iterator[tuple[str, Any]]:
    yield "evaluation_id", str(detail.evaluation_id)
    for name in ("problem_label", "problem_hash", "kernel_label", "kernel_hash", "backend", "lane", "state"):
        yield name, getattr(detail, name)
    yield "settings", detail.settings
    yield "verdict", detail.verdict and detail.verdict.summary()


def _cells(detail: Detail) -> Iterator[tuple[str, str | Text]]:
    from kqueue.cli.render import category_text, milliseconds, ratio

    verdict = detail.verdict
    yield "problem", f"{detail.problem_label or ''} {detail.problem_hash[:12]}"
    yield "kernel", f"{detail.kernel_label or ''} {detail.kernel_hash[:12]} ({detail.backend})"
    yield "lane", detail.lane
    yield "settings", shown_settings(detail.settings)
    yield "device", (verdict.environment.device or "") if verdict and verdict.environment else ""
    yield "category", category_text(verdict.category, verdict.blame) if verdict else detail.state
    runtime = verdict.runtime if verdict else None
    spread = f" ({milliseconds(runtime.q1_ms)} to {milliseconds(runtime.q3_ms)})" if runtime else ""
    yield "runtime ms", milliseconds(runtime.median_ms) + spread if runtime else ""
    yield "baseline ms", milliseconds(verdict.baseline_ms if verdict else None)
    yield "speedup", ratio(verdict.speedup if verdict else None)
    yield "message", verdict.message if verdict else ""
