"""The routes below ``/v1/reports``, one for each report that the command line reads (:mod:`kqueue.store.readable`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from inspect import Parameter, signature
from itertools import chain
from typing import Annotated, Any, Final, Literal, get_type_hints
from uuid import UUID

from fastapi import APIRouter, Response
from pydantic import ConfigDict, Field, TypeAdapter, create_model
from sqlalchemy import Engine

from kqueue.filters import Filters
from kqueue.http import failures, shapes
from kqueue.http.auth import Reader, Sharer
from kqueue.http.gateway import CurrentGateway
from kqueue.store import sharing
from kqueue.store.readable import PAGES, READABLE, result_of

router: Final = APIRouter(prefix="/reports")

#: Maximum number of rows of an answer, and of names in a request.
_MOST: Final = 10_001
_Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00]+$")]
#: Types with limits, by the type of a report's argument.
_LIMITED: Final[dict[Any, Any]] = {
    **shapes.LIMITED, str: _Name, int: Annotated[int, Field(ge=1, le=_MOST)],
    Collection[str]: Annotated[list[_Name], Field(max_length=_MOST)],
    Collection[UUID]: Annotated[list[UUID], Field(max_length=_MOST)],
}  # fmt: skip


def _add_route(report: Callable[..., Any], name: str) -> None:
    """Add the route of a report. Its body has the report's arguments, except ``within_s``, which the server knows."""
    kinds = get_type_hints(report)
    given = {one.name: one.default for one in signature(report).parameters.values()}
    if given.pop("filters", None) is not None:
        kinds, given = kinds | get_type_hints(Filters), given | dict.fromkeys(get_type_hints(Filters))
    fields: dict[str, Any] = {
        key: (_LIMITED.get(kinds[key], kinds[key]), ... if default is Parameter.empty else default)
        for key, default in given.items()
        if key not in ("engine", "within_s")
    }
    if report in PAGES:
        fields["limit"] = (Annotated[int, Field(ge=1, le=PAGES[report][1])], ...)
    # Pydantic would search all modules for the fields' docstrings, which takes a second.
    more: Any = {"__base__": shapes.Body, "__cls_kwargs__": {"use_attribute_docstrings": False}}
    body, answer = create_model(f"Arguments_{name}", **more, **fields), dict[Literal["result"], result_of(report)]
    adapter = TypeAdapter(answer, config=ConfigDict(ser_json_inf_nan="strings"))

    def read(engine: Engine, values: dict[str, Any]) -> bytes:
        found = report(engine, **values)
        return adapter.dump_json({"result": [*chain(*found)] if isinstance(found, Generator) else found})

    async def route(arguments: Any, _: Any, gateway: CurrentGateway) -> Response:
        known = {"within_s": gateway.config.live_s} if "within_s" in given else {}
        content = await gateway.read(read, known | {key: getattr(arguments, key) for key in fields})
        return Response(content, media_type="application/json")

    route.__annotations__ |= {"arguments": body, "_": Sharer if report in (sharing.share, sharing.unshare) else Reader}
    about, documented = (report.__doc__ or "").partition("\n\n")[0], failures.documented(404)
    router.post(f"/{name}", name=name, description=about, response_model=answer, responses=documented)(route)


for _report, _name in READABLE.items():
    _add_route(_report, _name)
