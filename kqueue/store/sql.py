"""Common code of the store's modules: small SQL expressions, and rows as dataclasses."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cache
from typing import Any, TypeVar
from uuid import UUID

from pydantic import TypeAdapter
from sqlalchemy import ColumnElement, Row, Text, Uuid, any_, literal
from sqlalchemy.dialects.postgresql import ARRAY

_T = TypeVar("_T")


def any_uuid(values: Collection[UUID]) -> ColumnElement[Any]:
    """Return ``ANY(values)`` with one parameter for any number of ids."""
    return any_(literal(list(values), ARRAY(Uuid)))


def any_text(values: Collection[str]) -> ColumnElement[Any]:
    """Return ``ANY(values)`` with one parameter for any number of texts."""
    return any_(literal(list(values), ARRAY(Text)))


def read(kind: type[_T], rows: Iterable[Row[*tuple[Any, ...]]], **more: Any) -> list[_T]:
    """Return rows as dataclasses. Columns have the fields' names, and text becomes the fields' enums.

    Args:
        more: values of fields without a column, the same for all rows.
    """
    reader = _reader(kind)
    return [reader.validate_python({**row._mapping, **more}) for row in rows]  # pyright: ignore[reportPrivateUsage]


@cache
def _reader(kind: type[_T]) -> TypeAdapter[_T]:
    return TypeAdapter(kind)
