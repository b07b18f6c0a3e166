"""`kqueue plot`: pictures of a problem, a batch, a run of a search or tuning, or an evaluation."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kqueue import plots, registry
from kqueue.cli.connection import Reader, reading
from kqueue.cli.render import STDOUT, form_of, write_picture
from kqueue.errors import InvalidRequest
from kqueue.plots import Kinds, Plots

if TYPE_CHECKING:
    from kqueue import charts


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
        typer.echo(drawn[chosen[0]], nl=False)
        return
    stem = re.sub(r"[^A-Za-z0-9._+-]", "-", name).lstrip(".-")[:60] or str(named.kind)
    for one, picture in drawn.items():
        write_picture(Path(f"{stem}-{one}.{form}") if out is None else Path(out), picture)


# Charts of each kind of subject -------------------------------------------------------------------------


def _of_run(read: Reader, key: str) -> Plots:
    from kqueue.store import reports

    available: dict[Kinds, Callable[[], charts.Chart]] = {}
    for name, made in (part(read, key) for part in registry.attached("charts")):
        key = name
        available |= {Kinds(kind): make for kind, make in made.items()}
    if read(reports.batch_state, key) is not None:
        available.update(plots.of_batch(read, key)[1])
    return key, available


_DRAWN: Final[Mapping[str, Callable[[Reader, str], Plots]]] = {
    "problem": plots.of_problem,
    "batch": plots.of_batch,
    "run": _of_run,
    "evaluation": plots.of_evaluation,
}
