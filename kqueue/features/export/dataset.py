"""Finished evaluations as a folder of Parquet files, which is a dataset for Hugging Face's `datasets` and for pandas.

Each file in ``data`` is complete, ``export.json`` has the conditions, and ``README.md`` is written last. An interrupted
export continues after the last row of the last file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any, Final, Unpack
from uuid import UUID

from pydantic import BaseModel, ValidationError

from kqueue.errors import InvalidRequest
from kqueue.filters import Filters
from kqueue.parquet import Writer
from kqueue.store import reports
from kqueue.store.reports import MEANINGS, Trajectory

_STATE: Final = "export.json"
_DATA: Final = "data"
_CARD: Final = "README.md"
#: Name of a file that is not complete. It is outside of the data's folder, which readers read as a whole.
_UNFINISHED: Final = "unfinished.new"


class Export(BaseModel):
    """The conditions of an export by the name of the option, and its times: ``until`` is at most the export's begin."""

    conditions: dict[str, str]
    since: datetime | None
    until: datetime | None


def export(
    read: Callable[..., Any], folder: Path, wanted: Export, *, rows: int, **filters: Unpack[Filters]
) -> Iterator[tuple[int, int]]:
    """Write finished evaluations to a folder, or continue an interrupted export.

    ``read`` calls the reports. ``wanted`` has the conditions in words and the times: an interrupted export must have
    the same conditions, and keeps its times. Each file has ``rows`` rows. Yield the numbers of rows and files so far,
    after each file and at the end. Raise InvalidRequest if the folder cannot be used, or no evaluation matches.
    """
    state = _begun(folder, wanted.conditions)
    if state is None:
        now = read(reports.now)
        state = wanted.model_copy(update={"until": min(now, wanted.until or now)})
    try:
        ends = [_end(file) for file in sorted((folder / _DATA).glob("*.parquet"))]
        while not (folder / _CARD).exists():
            after = ends[-1][1] if ends else None
            some = read(reports.trajectories, since=state.since, until=state.until, after=after, limit=rows, **filters)
            with closing(some):
                if first := next(some, None):
                    name = f"{_DATA}/train-{len(ends):05}.parquet"
                    folder.mkdir(parents=True, exist_ok=True)
                    _replace(folder, _STATE, [state.model_dump_json(indent=1).encode()])
                    (folder / _DATA).mkdir(exist_ok=True)
                    _replace(folder, name, _parquet(chain([first], some)))
                    ends.append(_end(folder / name))
                elif ends:
                    _replace(folder, _CARD, [_card(sum(count for count, _ in ends)).encode()])
                else:
                    raise InvalidRequest("no finished evaluation matches: nothing was exported")
            yield sum(count for count, _ in ends), len(ends)
    except OSError as error:
        raise InvalidRequest(f"{folder}: cannot be written: {error.strerror or error}") from None
    yield sum(count for count, _ in ends), len(ends)


def _begun(folder: Path, conditions: Mapping[str, str]) -> Export | None:
    """Return the export in a folder, or None if the folder is empty. Raise InvalidRequest if it has something else."""
    try:
        if not folder.exists() or not {one.name for one in folder.iterdir()} - {_UNFINISHED}:
            return None
        state = Export.model_validate_json((folder / _STATE).read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        raise InvalidRequest(f"{folder}: holds something else than an export ({error}): use another folder") from None
    if state.conditions != conditions:
        were = ", ".join(f"{name} {value}" for name, value in state.conditions.items()) or "no conditions"
        raise InvalidRequest(f"{folder}: holds an export with {were}: use another folder, or the same conditions")
    return state


def _end(file: Path) -> tuple[int, tuple[datetime, UUID]]:
    """Return the number of rows of a file, and ``finished_at`` and id of the last one."""
    from pyarrow import parquet

    opened: Any = parquet.ParquetFile(file)
    rows = opened.read_row_group(opened.num_row_groups - 1, columns=["finished_at", "evaluation_id"]).to_pylist()
    return opened.metadata.num_rows, (rows[-1]["finished_at"], UUID(rows[-1]["evaluation_id"]))


def _parquet(pages: Iterable[list[Trajectory]]) -> Iterator[bytes]:
    writer = Writer(Trajectory, list(Trajectory.__dataclass_fields__), exact=True)
    yield from map(writer.add, pages)
    yield writer.end()


def _replace(folder: Path, name: str, content: Iterable[bytes]) -> None:
    """Write a file in a folder, which is there as a whole or not at all, even after a loss of power."""
    fresh = folder / _UNFINISHED
    with fresh.open("wb") as opened:
        opened.writelines(content)
        opened.flush()
        os.fsync(opened.fileno())
    fresh.replace(folder / name)


def columns_table() -> str:
    """Return the columns with their types and meanings, in Markdown."""
    schema = Writer(Trajectory, list(Trajectory.__dataclass_fields__), exact=True).schema
    lines = ["| column | type | meaning |", "|---|---|---|"]
    for name in schema.names:
        kind = "struct" if str(schema.field(name).type).startswith("struct") else schema.field(name).type
        lines.append(f"| `{name}` | {kind} | {MEANINGS[name]} |")
    return "\n".join(lines) + "\n"


def _card(rows: int) -> str:
    """Return the dataset's card, with the front matter that `datasets` reads."""
    return f"""---
configs:
- config_name: default
  data_files:
  - split: train
    path: {_DATA}/*.parquet
---

# Judged GPU kernels

{rows} evaluations that kqueue judged, in the order of their ends. Each row is a problem, a kernel, and the verdict on
it. `{_STATE}` has the conditions of the export. Sources, prompts and answers are foreign text. They are stored
unchanged and must not be run outside a sandbox.

## Columns

{columns_table()}"""
