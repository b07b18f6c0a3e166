"""What addresses of lists have in common: filters, and the gateway that reads."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import Path
from pydantic import BeforeValidator, StringConstraints

from kqueue.contract import Backend, Precision
from kqueue.http.gateway import CurrentGateway

__all__ = ["Asked", "AskedBackend", "AskedPrecision", "BatchName", "CurrentGateway", "RunName", "asked_for"]

_LONGEST: Final = 200


def _given(value: object) -> object:
    """A field of a form that was left empty is no filter."""
    return (value.strip() or None) if isinstance(value, str) else value


#: A filter of any text.
Asked = Annotated[
    Annotated[str, StringConstraints(max_length=_LONGEST, pattern=r"^[^\x00]*$")] | None, BeforeValidator(_given)
]
#: A filter that is one of a few values.
AskedPrecision = Annotated[Precision | None, BeforeValidator(_given)]
AskedBackend = Annotated[Backend | None, BeforeValidator(_given)]
#: With slashes: batches are named by people.
BatchName = Annotated[str, Path(min_length=1, max_length=_LONGEST, pattern=r"^[^\x00]+$")]
#: A run's name, or the beginning of its id.
RunName = Annotated[str, Path(min_length=1, max_length=100, pattern=r"^[^\x00]+$")]


def asked_for(**filters: object) -> dict[str, str]:
    """Return the filters that were given, as they stand in addresses."""
    return {name: str(value) for name, value in filters.items() if value is not None}
