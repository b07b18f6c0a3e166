"""`kqueue plot`: pictures of a problem, a batch, a run of a search or tuning, or an evaluation."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final
from uuid import UUID

import typer

from kqueue import registry
from kqueue.cli.connection import Reader, reading
from kqueue.cli.render import STDOUT, form_of, write_picture
from kqueue.errors import InvalidRequest

if TYPE_CHECKING:
    from kqueue import charts
    from kqueue.evidence import Measurement

#: Maximum number of kernels on a leaderboard, so that it stays readable.
_BARS: Final = 20


class Kinds(StrEnum):
    """The kinds of pictures."""

    BEST = "best"
    LEADERBOARD = "leaderboard"
    CATEGORIES = "categories"
    FAST_P = "fast-p"
    CURVE = "curve"
    IMPORTANCES = "importances"
    TIMES = "times"
    ROOFLINE = "roofline"


def plot(
    what: Annotated[
        str,
        typer.Argument(
            metavar="PROBLEM|BATCH|RUN|EVALUATION",
            help="A problem's hash or label, a batch's or run's name, or an evaluation's id. First digits suffice.",
        ),
    ],
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="One picture, .svg or .png, or - for SVG to stdout.", show_default="all kinds"
        ),
    ] = None,
    kind: Annotated[
        str | None, typer.Option(metavar="KIND", help=f"{', '.join(Kinds)}.", show_default="the first that fits")
    ] = None,
    theme: Annotated[str, typer.Option(metavar="THEME", help="light or dark.")] = "light",
) -> None:
    """Draw the results of a problem, a batch, a run of a search, or an evaluation.

    Without --out and --kind, every kind that fits is written to NAME-KIND.svg in the current folder.
    """
    from kqueue import charts
    from kqueue.store import reports

    if theme not in list(charts.Theme):
        raise InvalidRequest(f"--theme {theme}: use one of {', '.join(charts.Theme)}")
    if kind is not None and kind not in list(Kinds):
        raise InvalidRequest(f"--kind {kind}: use one of {', '.join(Kinds)}")
    form = form_of(out)
    with reading("plot") as read:
        named = read(reports.named, what)
        name, fitting = _DRAWN[named.kind](read, named.key)
        if not fitting:
            raise InvalidRequest(
                f"the {named.kind} {what} has nothing to draw: no time was measured. See `kqueue show {what}`"
            )
        if kind is not None and kind not in fitting:
            raise InvalidRequest(f"--kind {kind}: for a {named.kind} use one of {', '.join(fitting)}")
        chosen = [Kinds(kind)] if kind is not None else list(fitting) if out is None else list(fitting)[:1]
        data = {one: fitting[one]() for one in chosen}
    drawn = {one: charts.render(chart, theme=charts.Theme(theme), form=form) for one, chart in data.items()}
    if out == STDOUT:
        sys.stdout.buffer.write(drawn[chosen[0]])
        sys.stdout.flush()
        return
    stem = re.sub(r"[^A-Za-z0-9._+-]", "-", name).lstrip(".-")[:60] or str(named.kind)
    for one, picture in drawn.items():
        write_picture(Path(f"{stem}-{one}.{form}") if out is None else Path(out), picture)


# Charts of each kind of subject -------------------------------------------------------------------------


#: The name for files, and the function that makes each chart.
_Charts = tuple[str, Mapping[Kinds, "Callable[[], charts.Chart]"]]


def _of_problem(read: Reader, key: str) -> _Charts:
    from kqueue import charts, examinations
    from kqueue.store import reports
    from kqueue.store.reports import boards

    stored = read(reports.problem, key)
    name = stored.problem_label or key[:12]
    points = read(reports.best_so_far, key)

    bars = [
        charts.Bar(
            one.kernel_label or one.kernel_hash[:12], one.speedup, one.speedup_low, one.speedup_high, one.device or ""
        )
        for one in read(boards.leaderboard, key, limit=_BARS)
        if one.speedup is not None
    ]
    available: dict[Kinds, Callable[[], charts.Chart]] = {
        Kinds.BEST: lambda: charts.BestSoFar(
            f"Best so far: {name}", [charts.Point(one.at, one.speedup, one.blame, one.evaluation_id) for one in points]
        ),
        Kinds.LEADERBOARD: lambda: charts.Leaderboard(f"Fastest kernels: {name}", bars),
        Kinds.CATEGORIES: lambda: charts.Categories(
            f"Outcomes: {name}", [charts.Stack(name, read(reports.outcomes, problem_hash=key))]
        ),
    }
    if not bars:
        del available[Kinds.LEADERBOARD]
    if profiles := {one.name: one.profile for one in read(boards.profiled, key)}:
        available[Kinds.ROOFLINE] = lambda: examinations.roofline(f"Roofline: {name}", profiles)
    return _with_id(stored.problem_label, key), available


def _of_batch(read: Reader, key: str) -> _Charts:
    from kqueue import charts
    from kqueue.store import reports

    def fast_p() -> charts.Chart:
        result = read(reports.fast_p, key)
        return charts.FastP(f"fast_p: {key}", result.speedups, result.problems)

    return key, {
        Kinds.CATEGORIES: lambda: charts.Categories(
            f"Outcomes: {key}", [charts.Stack(key, read(reports.outcomes, batch=key))]
        ),
        Kinds.FAST_P: fast_p,
    }


def _of_run(read: Reader, key: str) -> _Charts:
    from kqueue.store import reports

    available: dict[Kinds, Callable[[], charts.Chart]] = {}
    for name, made in (part(read, key) for part in registry.attached("charts")):
        key = name
        available |= {Kinds(kind): make for kind, make in made.items()}
    if read(reports.batch_state, key) is not None:
        available.update(_of_batch(read, key)[1])
    return key, available


def _of_evaluation(read: Reader, key: str) -> _Charts:
    from kqueue import charts, examinations
    from kqueue.evidence import Measurement
    from kqueue.store import reports

    detail = read(reports.show, UUID(key))
    verdict = detail.verdict
    timed: list[tuple[str, Measurement | None]] = []
    if verdict is not None and verdict.runtime is not None:
        compiled = verdict.evidence.compiled_baseline
        timed = [
            (detail.kernel_label or "the kernel", verdict.runtime),
            ("the reference", verdict.baseline),
            ("the reference, compiled", compiled if isinstance(compiled, Measurement) else None),
        ]
    name = detail.problem_label or key[:8]
    available: dict[Kinds, Callable[[], charts.Chart]] = {}
    if timed:
        available[Kinds.TIMES] = lambda: charts.Times.of(f"Timed calls: {name}", timed)
    profile = verdict and verdict.evidence.profile
    if profile:
        label = detail.kernel_label or "the kernel"
        available[Kinds.ROOFLINE] = lambda: examinations.roofline(f"Roofline: {name}", {label: profile})
    return _with_id(detail.kernel_label, key), available


def _with_id(label: str | None, key: str) -> str:
    """Return a name for files: a label, and the first digits of a hash or id because labels are not unique."""
    return f"{label[:48]}-{key[:8]}" if label else key[:12]


_DRAWN: Final[Mapping[str, Callable[[Reader, str], _Charts]]] = {
    "problem": _of_problem,
    "batch": _of_batch,
    "run": _of_run,
    "evaluation": _of_evaluation,
}
