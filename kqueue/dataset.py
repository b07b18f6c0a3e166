"""Finished evaluations as a folder of Parquet files, which is a dataset for Hugging Face's `datasets` and for pandas.

``export.json`` in the folder has the conditions and the files that are complete. An interrupted export continues after
the last of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Final, Self, Unpack
from uuid import UUID

from pydantic import BaseModel, ValidationError
from sqlalchemy import Engine

from kqueue import figures
from kqueue.errors import InvalidRequest
from kqueue.parquet import Writer
from kqueue.store import reports
from kqueue.store.reports import Trajectory
from kqueue.store.reports.listing import Filters
from kqueue.text import clean, one_line

_STATE: Final = "export.json"
_DATA: Final = "data"
_UNFINISHED: Final = "unfinished.new"
#: Upper bounds of Hugging Face's size categories, with their names.
_SIZES: Final = {1_000: "n<1K", 10_000: "1K<n<10K", 100_000: "10K<n<100K", 1_000_000: "100K<n<1M"}


class File(BaseModel):
    """A complete file of the dataset."""

    name: str
    rows: int


class Export(BaseModel):
    """The state of an export.

    Attributes:
        conditions: the conditions on the evaluations, by the name of the option.
        since, until: earliest time of a verdict, and the time before which it was reached.
        files: the complete files.
        after: ``finished_at`` and id of the last row in them.
        complete: True once all rows are in the files.
    """

    conditions: dict[str, str]
    since: datetime | None
    until: datetime
    files: list[File] = []
    after: tuple[datetime, UUID] | None = None
    complete: bool = False

    @property
    def rows(self) -> int:
        """The number of rows in the complete files."""
        return sum(file.rows for file in self.files)

    @classmethod
    def read(cls, folder: Path, conditions: Mapping[str, str]) -> Self | None:
        """Return the state of an earlier export with the same conditions, or None if the folder has none.

        Raises:
            InvalidRequest: the folder has other files, or an export with other conditions.
        """
        try:
            if not folder.exists() or not {one.name for one in folder.iterdir()} - {f"{_STATE}.new"}:
                return None
            state = cls.model_validate_json((folder / _STATE).read_text(encoding="utf-8"))
        except (OSError, ValidationError) as error:
            raise InvalidRequest(
                f"{folder}: holds something else than an export ({error}): use another folder"
            ) from None
        if state.conditions != conditions:
            were = ", ".join(f"{name} {value}" for name, value in state.conditions.items()) or "no conditions"
            raise InvalidRequest(f"{folder}: holds an export with {were}: use another folder, or the same conditions")
        return state

    def write(self, folder: Path) -> None:
        """Replace the state in the folder at once."""
        _replace(folder / _STATE, self.model_dump_json(indent=1).encode())


def export(
    engine: Engine,
    folder: Path,
    conditions: Mapping[str, str],
    *,
    label: str | None,
    since: datetime | None,
    before: datetime | None,
    rows: int,
    wrote: Callable[[int], None],
    **filters: Unpack[Filters],
) -> Export:
    """Write finished evaluations to a folder, or continue an interrupted export.

    Args:
        conditions: the conditions in words, which must be the same to continue.
        label, filters: the conditions on the evaluations, as for :func:`~kqueue.store.reports.trajectories`.
        since, before: earliest time of a verdict, and the time before which it was reached. Verdicts after the export's
            beginning are not in it.
        rows: number of rows of a file.
        wrote: called with the number of rows so far.

    Raises:
        InvalidRequest: the folder cannot be used, or no evaluation matches.
        ConfigError: pyarrow is not installed.
    """
    state = Export.read(folder, conditions)
    if state is None:
        now = reports.now(engine)
        state = Export(conditions=dict(conditions), since=since, until=min(now, before or now))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        state.write(folder)
        (folder / _DATA).mkdir(exist_ok=True)
        while not state.complete:
            some = reports.trajectories(
                engine,
                since=state.since,
                until=state.until,
                after=state.after,
                label=label,
                limit=rows,
                **filters,
            )
            with closing(some):
                _add_file(folder, state, some, wrote)
            state.write(folder)
        if not state.files:
            (folder / _STATE).unlink()
            (folder / _DATA).rmdir()
            raise InvalidRequest("no finished evaluation matches: nothing was exported")
        _replace(folder / "README.md", _card(state).encode())
    except OSError as error:
        raise InvalidRequest(f"{folder}: cannot be written: {error.strerror or error}") from None
    return state


def _add_file(folder: Path, state: Export, some: Iterator[list[Trajectory]], wrote: Callable[[int], None]) -> None:
    """Write rows to the next file and add it to the state. If there are none, the export is complete."""
    name = f"{_DATA}/train-{len(state.files):05}.parquet"
    # Until it is complete, it is outside of the data's folder, which readers read as a whole.
    fresh = folder / _UNFINISHED
    writer = Writer(Trajectory, list(Trajectory.model_fields), exact=True)
    count, last = 0, state.after
    with fresh.open("wb") as file:
        for page in some:
            file.write(writer.add(page))
            count, last = count + len(page), (page[-1].finished_at, page[-1].evaluation_id)
            wrote(state.rows + count)
        file.write(writer.end())
        file.flush()
        os.fsync(file.fileno())
    if count:
        fresh.replace(folder / name)
        state.files.append(File(name=name, rows=count))
        state.after = last
    else:
        fresh.unlink()
        state.complete = True


def _replace(file: Path, content: bytes) -> None:
    """Write a file, which has either its old content or the new one, even after a loss of power."""
    fresh = file.with_name(file.name + ".new")
    with fresh.open("wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())
    fresh.replace(file)


def columns_table() -> str:
    """Return the columns with their types and meanings, in Markdown."""
    schema = Writer(Trajectory, list(Trajectory.model_fields), exact=True).schema
    lines = ["| column | type | meaning |", "|---|---|---|"]
    for name, field in Trajectory.model_fields.items():
        kind = "struct" if str(schema.field(name).type).startswith("struct") else schema.field(name).type
        lines.append(f"| `{name}` | {kind} | {' '.join((field.description or '').split())} |")
    return "\n".join(lines) + "\n"


def _card(state: Export) -> str:
    """Return the dataset's card, with the front matter that `datasets` reads."""
    size = next((name for most, name in _SIZES.items() if state.rows < most), "1M<n<10M")
    conditions = [f"- {name}: {one_line(value)}" for name, value in state.conditions.items()] or ["- none"]
    return f"""---
pretty_name: Judged GPU kernels
configs:
- config_name: default
  data_files:
  - split: train
    path: {_DATA}/*.parquet
size_categories:
- {size}
tags:
- code
- gpu-kernels
- kqueue
---

# Judged GPU kernels

{state.rows} evaluations that kqueue judged before {figures.moment(state.until)}, in the order of their ends. Each row
is a problem, a kernel, and the verdict on it. Conditions of the export:

{clean(chr(10).join(conditions))}

Sources, prompts and answers are foreign text. They are stored unchanged and must not be run outside a sandbox.

## Columns

{columns_table()}"""
