"""Small SQL expressions that the store's modules share."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Text, Uuid, any_, literal
from sqlalchemy.dialects.postgresql import ARRAY


def any_uuid(values: Collection[UUID]) -> ColumnElement[Any]:
    """Return ``ANY(values)``: one parameter, however many ids there are."""
    return any_(literal(list(values), ARRAY(Uuid)))


def any_text(values: Collection[str]) -> ColumnElement[Any]:
    """Return ``ANY(values)``: one parameter, however many texts there are."""
    return any_(literal(list(values), ARRAY(Text)))
