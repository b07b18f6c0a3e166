"""Entries: a producer's requests, which are validated before they are sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from uuid import UUID

from kqueue.contract import Request, parse_request
from kqueue.errors import InvalidRequest, UnknownEvaluation

#: A request, or its fields by name.
Entry = Request | Mapping[str, Any]


def entry_of(request: Request | None, **fields: Any) -> Entry:
    """Return the entry that was given as a request or by its fields. Raise InvalidRequest for both at once."""
    given = {name: value for name, value in fields.items() if value is not None}
    if request is None:
        return given
    if given.keys() - {"lane"} or given.get("lane", "auto") != "auto":
        raise InvalidRequest("request: give a Request or its fields, not both")
    return request


def check(entry: Entry) -> Request:
    """Return a valid request for an entry, or raise InvalidRequest."""
    if isinstance(entry, Request):
        return entry
    if not isinstance(entry, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidRequest(f"request: must be a kqueue.Request or a mapping of its fields, not {type(entry)}")
    return parse_request(entry)


def check_all(entries: Iterable[Entry]) -> list[Request]:
    """Return valid requests for all entries, or raise InvalidRequest with the index of a wrong entry."""
    requests: list[Request] = []
    for number, entry in enumerate(entries):
        try:
            requests.append(check(entry))
        except InvalidRequest as error:
            raise at(number, error) from None
    return requests


def check_each(entries: Iterable[Entry]) -> list[Request | InvalidRequest]:
    """Return a valid request or an error for each entry."""
    checked: list[Request | InvalidRequest] = []
    for entry in entries:
        try:
            checked.append(check(entry))
        except InvalidRequest as error:
            checked.append(error)
    return checked


def at(number: int, error: InvalidRequest) -> InvalidRequest:
    """Add an entry's index to the error's message, and return the error."""
    error.args = (f"entry {number}: {error}",)
    return error


def id_of(evaluation_id: UUID | str) -> UUID:
    """Return an evaluation's id, or raise UnknownEvaluation for text that is not an id."""
    if isinstance(evaluation_id, UUID):
        return evaluation_id
    try:
        return UUID(evaluation_id)
    except (ValueError, AttributeError, TypeError):
        raise UnknownEvaluation(evaluation_id) from None
