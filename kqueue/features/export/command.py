"""`kqueue export`: finished evaluations as a dataset of Parquet files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kqueue import figures
from kqueue.cli import options, results
from kqueue.cli.connection import reading
from kqueue.cli.render import emit, make_bar
from kqueue.text import clean


def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder, or the one of an interrupted export.")],
    *,
    where: Annotated[
        list[str] | None, typer.Option(metavar="FIELD=VALUE", help=f"{', '.join(results.WHERE)}. Repeatable.")
    ] = None,
    problem: Annotated[str | None, typer.Option(help="A problem's label, or the first digits of its hash.")] = None,
    batch: Annotated[str | None, typer.Option(help="The name of a batch.")] = None,
    label: Annotated[str | None, typer.Option(help="A part of the kernel's label.")] = None,
    since: Annotated[str | None, typer.Option(help="Such as 30m, 2h, 7d, or 2026-01-31 (UTC).")] = None,
    until: Annotated[str | None, typer.Option(help="The same. Verdicts from then on are not exported.")] = None,
    owner: Annotated[str | None, typer.Option(help="Only this owner's evaluations.")] = None,
    rows: Annotated[int, typer.Option(min=1, max=10_000_000, help="Maximum number of rows of a file.")] = 50_000,
    as_json: options.Json = False,
) -> None:
    """Write finished evaluations to a folder of Parquet files. Run it again to resume."""
    given = {"problem": problem, "batch": batch, "label": label, "since": since, "until": until, "owner": owner}
    conditions = {name: value for name, value in given.items() if value is not None}
    conditions |= {"where": " ".join(sorted(where))} if where else {}
    filters = results.conditions(where or (), {"problem": problem, "batch": batch, "kernel": label})
    after = None if since is None else figures.since(since)
    before = None if until is None else figures.since(until, "--until")
    if owner is not None:
        options.check_owner(owner)
    from kqueue import parquet
    from kqueue.features.export import dataset

    parquet.require()
    with reading("export", owner) as read, make_bar(quiet=as_json) as bar:
        task, done = bar.add_task("rows", total=None), (0, 0)
        wanted = dataset.Export(conditions=conditions, since=after, until=before)
        for done in dataset.export(read, folder, wanted, rows=rows, **filters):
            bar.update(task, completed=done[0])
    count, files = done
    said = clean(f"{folder}: {count} evaluations in {files} file{'s'[: files > 1]}")
    emit({"folder": str(folder), "rows": count, "files": files}, lambda _: print(said), as_json=as_json, record=dict)
