"""Records as Parquet, with typed columns. A file is written in row groups while it is sent."""

from __future__ import annotations

import io
from collections.abc import Sequence
from datetime import datetime
from importlib.util import find_spec
from types import NoneType
from typing import Any, Final, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from kqueue.errors import ConfigError
from kqueue.text import clean

#: Rows and bytes at which a row group ends, whichever comes first. Only the unfinished group is in memory.
GROUP_ROWS: Final = 10_000
GROUP_BYTES: Final = 8 * 2**20


def can_write() -> bool:
    """Return True if pyarrow is installed."""
    return find_spec("pyarrow") is not None


def require() -> None:
    """Raise ConfigError if pyarrow is not installed."""
    if not can_write():
        raise ConfigError("Parquet needs pyarrow: pip install 'kqueue[parquet]'")


class Writer:
    """A writer for records of one dataclass or model of pydantic.

    Times are in UTC with microseconds. Ids and enumerations become texts, models structs, and tuples lists. All other
    values keep their types.
    """

    def __init__(self, kind: type[Any], columns: Sequence[str], *, exact: bool = False) -> None:
        """Begin a file with these fields of ``kind``. Raise ConfigError without pyarrow.

        ``exact`` keeps texts as they are, instead of cleaning them like on pages.
        """
        require()
        import pyarrow
        from pyarrow import parquet

        self._arrow: Any = pyarrow
        hints = get_type_hints(kind)
        #: The schema of the file, by pyarrow.
        self.schema: Any = self._arrow.schema([self._field(name, hints[name]) for name in columns])
        self._text = str if exact else clean
        self._made = _Made()
        self._writer: Any = parquet.ParquetWriter(self._made, self.schema)
        self._held: list[Any] = []
        self._rows = 0
        self._bytes = 0

    def add(self, records: Sequence[Any]) -> bytes:
        """Add records and return the new bytes of the file, which are empty until a row group is full."""
        values = [
            self._arrow.array([self._value(getattr(record, field.name)) for record in records], field.type)
            for field in self.schema
        ]
        batch = self._arrow.RecordBatch.from_arrays(values, schema=self.schema)
        self._held.append(batch)
        self._rows += batch.num_rows
        self._bytes += batch.nbytes
        if self._rows >= GROUP_ROWS or self._bytes >= GROUP_BYTES:
            self._end_group()
        return self._made.take()

    def end(self) -> bytes:
        """Return the rest of the file."""
        if self._held:
            self._end_group()
        self._writer.close()
        return self._made.take()

    def _end_group(self) -> None:
        self._writer.write_table(self._arrow.Table.from_batches(self._held), row_group_size=self._rows)
        self._held, self._rows, self._bytes = [], 0, 0

    def _field(self, name: str, hint: Any) -> Any:
        kinds = {
            bool: self._arrow.bool_(),
            int: self._arrow.int64(),
            float: self._arrow.float64(),
            datetime: self._arrow.timestamp("us", tz="UTC"),
        }
        parts = (hint,) if get_origin(hint) is tuple else get_args(hint) or (hint,)
        kind = next((kinds[part] for part in parts if part in kinds), self._arrow.string())
        for part in parts:
            if get_origin(part) is tuple:
                kind = self._arrow.list_(self._field("item", get_args(part)[0]).type)
            elif isinstance(part, type) and issubclass(part, BaseModel):
                within = get_type_hints(part)
                kind = self._arrow.struct([self._field(field, within[field]) for field in part.model_fields])
        return self._arrow.field(name, kind, nullable=NoneType in parts)

    def _value(self, value: object) -> object:
        if isinstance(value, BaseModel):
            return value.model_dump()
        is_plain = value is None or isinstance(value, datetime | bool | int | float | tuple)
        return value if is_plain else self._text(value)


class _Made(io.RawIOBase):
    """A buffer for the writer's output."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        self._parts.append(bytes(data))
        return len(self._parts[-1])

    def take(self) -> bytes:
        """Return the bytes since the last call, and empty the buffer."""
        made, self._parts = b"".join(self._parts), []
        return made
