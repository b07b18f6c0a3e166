"""`kqueue problems`: other projects' sets of problems, and verdicts in the form of flashinfer-bench."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from kqueue.cli import options
from kqueue.cli.render import Columns, say, table, write_json
from kqueue.errors import InvalidRequest

_Set = Annotated[Path, typer.Argument(metavar="SET", help="A file or folder of a known format.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Use other projects' sets of problems.")
    group.command("import")(import_)
    group.command()(traces)
    app.add_typer(group, name="problems", cls=app.info.cls)


def import_(
    folder: _Set,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the translated problems to DIR/NAME.py.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """List the problems of a set. Exit with 1 if some cannot be translated. The list has the reasons."""
    from kqueue import formats

    rows: list[dict[str, Any]] = []
    for number, entry in enumerate(formats.read(folder), 1):
        row: dict[str, Any] = {"number": number, "name": entry.name, "refused": None}
        if isinstance(entry, formats.Refused):
            row["refused"] = entry.reason
        else:
            row["shapes"] = [shape.name for shape in entry.shapes]
            row |= {"kernels": list(entry.solutions), "notes": entry.notes}
            if out is not None:
                place = out / f"{_safe(entry.name)}.py"
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(entry.source, encoding="utf-8")
        rows.append(row)
        if as_json:
            write_json(row)
    refused = sum(row["refused"] is not None for row in rows)
    if not as_json:
        columns: Columns[dict[str, Any]] = {
            "": lambda row: str(row["number"]),
            "problem": lambda row: row["name"],
            "shapes": lambda row: "-" if row["refused"] else str(len(row["shapes"]) or 1),
            "kernels": lambda row: "-" if row["refused"] else str(len(row["kernels"])),
            "note": lambda row: f"refused: {row['refused']}" if row["refused"] else "; ".join(row["notes"]),
        }
        table(columns)(rows)
        say(f"{len(rows) - refused} of {len(rows)} translated from {formats.recognise(folder)}")
    if refused:
        raise typer.Exit(1)


def traces(
    folder: _Set,
    verdicts: Annotated[
        typer.FileText, typer.Argument(metavar="VERDICTS", help="Output of `judge --json`, or - for stdin.")
    ],
) -> None:
    """Print verdicts on a set of flashinfer-bench as its traces, one for each workload."""
    from kqueue.formats.traces import traces_of

    for number, line in enumerate(filter(str.strip, verdicts), 1):
        try:
            record = json.loads(line)
            for trace in traces_of(folder, record):
                write_json(trace)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidRequest(f"line {number}: no verdict of `kqueue judge --json`: {error!r}") from None


def _safe(name: str) -> str:
    """Return a name as a relative path below a folder."""
    parts = [re.sub(r"[^\w.+-]", "_", part).lstrip(".") for part in name.split("/")]
    return "/".join(filter(None, parts)) or "_"
