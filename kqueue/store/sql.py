"""Common code of the store's modules: small SQL expressions, and rows as dataclasses."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cache
from typing import Any, TypeVar
from uuid import UUID

from pydantic import BaseModel, TypeAdapter
from sqlalchemy import ColumnElement, Engine, Executable, FromClause, Row, Text, Uuid, any_, inspect, literal
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import InstrumentedAttribute

from kqueue.store.engine import transaction

_T = TypeVar("_T")


def any_uuid(values: Collection[UUID]) -> ColumnElement[Any]:
    """Return ``ANY(values)`` with one parameter for any number of ids."""
    return any_(literal(list(values), ARRAY(Uuid)))


def any_text(values: Collection[str]) -> ColumnElement[Any]:
    """Return ``ANY(values)`` with one parameter for any number of texts."""
    return any_(literal(list(values), ARRAY(Text)))


def columns(kind: type[Any], *sources: Any, **named: ColumnElement[Any] | InstrumentedAttribute[Any]) -> list[Any]:
    """Return the columns of a query whose rows :func:`read` returns as ``kind``, a dataclass or a model of pydantic.

    The first source that has a column with a field's name provides it, unless ``named`` has a column. A field that none
    has gets its value from :func:`read`.
    """
    known = {name: column.label(name) for name, column in named.items()}
    for source in sources:
        if isinstance(source, FromClause):
            known = dict(source.c) | known
        else:
            known = {column.key: getattr(source, column.key) for column in inspect(source).mapper.columns} | known
    names = kind.model_fields if issubclass(kind, BaseModel) else kind.__dataclass_fields__
    return [known[name] for name in names if name in known]


def fetch(engine: Engine, kind: type[_T], query: Executable) -> list[_T]:
    """Return the rows of a query as dataclasses (:func:`read`), in one transaction."""
    with transaction(engine) as connection:
        return read(kind, connection.execute(query))


def read(kind: type[_T], rows: Iterable[Row[*tuple[Any, ...]]], **more: Any) -> list[_T]:
    """Return rows as dataclasses. Columns have the fields' names, and text becomes the fields' enums.

    ``more`` are the values of fields without a column, the same for all rows.
    """
    reader = _reader(kind)
    return [reader.validate_python({**row._mapping, **more}) for row in rows]  # pyright: ignore[reportPrivateUsage]


@cache
def _reader(kind: type[_T]) -> TypeAdapter[_T]:
    return TypeAdapter(kind)
