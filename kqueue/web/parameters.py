"""Parameters that the routes of lists share: filters in URLs, and the gateway."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import Path
from pydantic import BeforeValidator, StringConstraints

from kqueue.contract import BackendName, Precision
from kqueue.http.events import BatchName
from kqueue.http.gateway import CurrentGateway

__all__ = ["BackendFilter", "BatchName", "CurrentGateway", "PrecisionFilter", "RunName", "TextFilter", "given_filters"]

_LONGEST: Final = 200


def _given(value: object) -> object:
    """Return a form's value, or None for an empty field, which is no filter."""
    return (value.strip() or None) if isinstance(value, str) else value


#: Filter with any text.
TextFilter = Annotated[
    Annotated[str, StringConstraints(max_length=_LONGEST, pattern=r"^[^\x00]*$")] | None, BeforeValidator(_given)
]
#: Filters with a fixed set of values.
PrecisionFilter = Annotated[Precision | None, BeforeValidator(_given)]
BackendFilter = Annotated[BackendName | None, BeforeValidator(_given)]
#: Name of a run, or the beginning of its id.
RunName = Annotated[str, Path(min_length=1, max_length=100, pattern=r"^[^\x00]+$")]


def given_filters(**filters: object) -> dict[str, str]:
    """Return the given filters in the form of a URL's query."""
    return {name: str(value) for name, value in filters.items() if value is not None}
