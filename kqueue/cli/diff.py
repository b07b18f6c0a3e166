"""`kqueue diff`: two evaluations side by side."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kqueue.cli.results import database, shown_settings

if TYPE_CHECKING:
    from rich.text import Text

    from kqueue.store.reports import Detail

_STYLES: Final = {"+": "green", "-": "red", "@": "cyan"}
_Id = Annotated[str, typer.Argument(help="An evaluation's id, or its first digits.")]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(diff)


def diff(
    first: _Id,
    second: _Id,
    context: Annotated[int, typer.Option(min=0, max=10_000, help="Lines round each change.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="One record: `first`, `second`, `diff`.")] = False,
) -> None:
    """Show how two evaluations differ: verdicts, times and sources."""
    from rich.text import Text

    from kqueue.cli.render import console, print_table, text, write_json
    from kqueue.store import reports
    from kqueue.text import clean

    with database("diff") as engine:
        pair = [reports.show(engine, reports.resolve_id(engine, name)) for name in (first, second)]
    a, b = pair
    changes = [
        line.rstrip("\n")
        for what in ("problem", "kernel")
        for line in difflib.unified_diff(
            getattr(a, what).splitlines(),
            getattr(b, what).splitlines(),
            _named(a, what),
            _named(b, what),
            "",
            "",
            context,
        )
    ]
    if as_json:
        told = [dict(_plain(detail)) for detail in pair]
        write_json({"first": told[0], "second": told[1], "diff": "\n".join(changes)})
        return
    cells = [dict(_cells(detail)) for detail in pair]
    print_table(
        ("", *(str(detail.evaluation_id)[:8] for detail in pair)),
        ((name, *(c[name] for c in cells)) for name in cells[0]),
    )
    if told := _faster(a, b):
        console().print(text(told))
    for line in changes or ["the sources are the same"]:
        console().print(Text(clean(line), _STYLES.get(line[:1], "")), soft_wrap=True)


def _named(detail: Detail, what: str) -> str:
    label = getattr(detail, f"{what}_label") or getattr(detail, f"{what}_hash")[:12]
    return f"{what} {label} of {str(detail.evaluation_id)[:8]}"


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


def _faster(a: Detail, b: Detail) -> str:
    """Return which of two kernels is faster, in words; empty where their times cannot be compared."""
    one, other = (detail.verdict and detail.verdict.runtime for detail in (a, b))
    if not one or not other or a.problem_hash != b.problem_hash or min(one.median_ms, other.median_ms) <= 0:
        return ""
    if a.verdict and b.verdict and _device(a) != _device(b):
        return "they were timed on devices of other models"
    ratio = one.median_ms / other.median_ms
    if one.q1_ms <= other.q3_ms and other.q1_ms <= one.q3_ms:
        return f"the second takes {1 / ratio:.3g} of the first's time; their quartiles overlap"
    return f"the second is {ratio:.3g}x as fast as the first"


def _device(detail: Detail) -> str | None:
    return detail.verdict.environment.device if detail.verdict and detail.verdict.environment else None
