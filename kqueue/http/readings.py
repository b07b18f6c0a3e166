"""The routes of operations that read (:mod:`kqueue.store.readable`): resources below ``/v1``, and ``/v1/reports``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from datetime import UTC, datetime
from inspect import Parameter, Signature, signature
from itertools import chain
from operator import attrgetter
from typing import Annotated, Any, Final, Literal, cast, get_args, get_type_hints
from uuid import UUID

from fastapi import APIRouter, Path, Query, Response
from pydantic import ConfigDict, Field, TypeAdapter, create_model
from sqlalchemy import Engine

from kqueue.contract import HASH
from kqueue.filters import FILTERS
from kqueue.http import cursors, events, failures, shapes
from kqueue.http.auth import Reader, Sharer
from kqueue.http.gateway import CurrentGateway, Gateway
from kqueue.store.readable import CHANGES, PAGES, READABLE, RESOURCES, result_of

router: Final = APIRouter(prefix="/v1", tags=["v1"])

#: Maximum number of rows of an answer, and of names in a request.
_MOST: Final = 10_001
_Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00]+$")]
#: Types with limits, by the type of an argument.
_LIMITED: Final[dict[Any, Any]] = {
    str | None: shapes.Text, str | Collection[str] | None: shapes.Text,
    str: _Name, int: Annotated[int, Field(ge=1, le=_MOST)],
    Collection[str]: Annotated[list[_Name], Field(max_length=_MOST)],
    Collection[UUID]: Annotated[list[UUID], Field(max_length=_MOST)],
}  # fmt: skip
#: Types of arguments in paths, by name.
_IN_PATHS: Final[dict[str, Any]] = {
    "batch": events.BatchName, "evaluation_id": UUID,
    "problem_hash": Annotated[str, Path(pattern=f"^{HASH}$", description="SHA-256 of the source.")],
}  # fmt: skip
_Limit = Annotated[int, Field(ge=1, le=1000)]
_Cursor = Annotated[str | None, Field(description="The cursor of the next page, or null on the last page.")]
# Pydantic would search all modules for the fields' docstrings, which takes a second.
_FAST: Final[Any] = {"use_attribute_docstrings": False}


def _arguments(report: Callable[..., Any]) -> dict[str, tuple[Any, str | None, Any]]:
    """Return the type with limits, the description and the default of each argument of an operation.

    A default of ``...`` is none. The server knows ``within_s``.
    """
    kinds = get_type_hints(report, include_extras=True)
    given = {one.name: one.default for one in signature(report).parameters.values()}
    if given.pop("filters", None) is not None:
        kinds, given = kinds | FILTERS, given | dict.fromkeys(FILTERS)
    arguments: dict[str, tuple[Any, str | None, Any]] = {}
    for name, default in given.items():
        kind, *captions = get_args(kinds[name]) if hasattr(kinds[name], "__metadata__") else (kinds[name],)
        about = next(iter(captions or getattr(FILTERS.get(name), "__metadata__", ())), None)
        arguments[name] = _LIMITED.get(kind, kind), about, ... if default is Parameter.empty else default
    return {name: one for name, one in arguments.items() if name not in ("engine", "within_s")}


def _known(report: Callable[..., Any], gateway: Gateway) -> dict[str, Any]:
    """Return the arguments of an operation that the server knows."""
    return {"within_s": gateway.config.live_s} if "within_s" in signature(report).parameters else {}


def _about(report: Callable[..., Any]) -> str:
    return (report.__doc__ or "").partition("\n\n")[0]


def _add_report(report: Callable[..., Any], name: str) -> None:
    """Add the route of a report. Its body has the report's arguments."""
    fields: dict[str, Any] = {key: (kind, default) for key, (kind, _, default) in _arguments(report).items()}
    if report in PAGES:
        fields["limit"] = (Annotated[int, Field(ge=1, le=PAGES[report][1])], ...)
    body = create_model(f"Arguments_{name}", __base__=shapes.Body, __cls_kwargs__=_FAST, **fields)
    answer: Any = dict[Literal["result"], result_of(report)]
    adapter = TypeAdapter(answer, config=ConfigDict(ser_json_inf_nan="strings"))

    def read(engine: Engine, values: dict[str, Any]) -> bytes:
        found = report(engine, **values)
        return adapter.dump_json({"result": [*chain(*found)] if isinstance(found, Generator) else found})

    async def route(arguments: Any, _: Any, gateway: CurrentGateway) -> Response:
        values = {key: getattr(arguments, key) for key in fields} | _known(report, gateway)
        return Response(await gateway.read(read, values), media_type="application/json")

    route.__annotations__ |= {"arguments": body, "_": Sharer if report in CHANGES else Reader}
    documented: Any = {"description": _about(report), "responses": failures.documented(404)}
    router.post(f"/reports/{name}", name=name, response_model=answer, **documented)(route)


def _add_resource(path: str, report: Callable[..., Any], name: str, answer: Any) -> None:
    """Add the route of a resource. Its path and query have the operation's arguments."""
    arguments, ordered, listed = _arguments(report), PAGES[report][0] if report in PAGES else None, ""
    if isinstance(answer, tuple):
        shape, listed = answer
        more: Any = {listed: (result_of(report), ...)} | ({"cursor": (_Cursor, ...)} if ordered else {})
        answer = create_model(shape, __base__=shapes.Shape, __cls_kwargs__=_FAST, **more)
    if ordered:
        arguments |= {"after": (shapes.Text, None, None)}

    async def route(_: object, gateway: Gateway, **given: Any) -> Any:
        for key, value in given.items():
            if isinstance(value, datetime) and value.tzinfo is None:
                given[key] = value.replace(tzinfo=UTC)
        cursor, limit = given.pop("cursor", None), given.get("limit", 0)
        if ordered:
            identity = UUID if ordered[1] == "evaluation_id" else cursors.checked_hash
            given |= {"limit": limit + 1, "after": None if cursor is None else cursors.read(cursor, identity)}
        found: Any = await gateway.read(report, **given, **_known(report, gateway))
        if listed:
            page, cursor = cursors.page(found, limit, attrgetter(*ordered)) if ordered else (found, None)
            return {listed: page, "cursor": cursor}
        if found is None and "batch" in given:
            raise events.unknown_batch(given["batch"])
        return found

    parameters: dict[str, Any] = {"_": (Sharer if report in CHANGES else Reader,), "gateway": (CurrentGateway,)}
    for key, (kind, about, default) in arguments.items():
        if f"{{{key}" in path:
            parameters[key] = (_IN_PATHS[key],)
        else:
            kind = _Limit if key == "limit" else kind
            parameters["cursor" if key == "after" else key] = Annotated[kind, Query(description=about)], default
    cast("Any", route).__signature__ = Signature(
        [
            Parameter(key, Parameter.KEYWORD_ONLY, annotation=kind, default=default[0] if default else Parameter.empty)
            for key, (kind, *default) in parameters.items()
        ]
    )
    result = None if result_of(report) is type(None) else answer or result_of(report)
    documented: Any = {"description": _about(report), "response_model": result}
    status = 200 if result else 204
    router.api_route(path, methods=[CHANGES.get(report, "GET")], name=name, status_code=status, **documented)(route)


for _report, _name in READABLE.items():
    _add_report(_report, _name)
for _name, (_path, _report, _answer) in RESOURCES.items():
    _add_resource(_path, _report, _name, _answer)
