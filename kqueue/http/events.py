"""The progress of a batch as server-sent events."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterable
from datetime import datetime, timedelta
from functools import partial
from typing import Annotated, Final
from uuid import UUID

from fastapi import APIRouter, Header, Path, Response
from fastapi.sse import format_sse_event
from pydantic import TypeAdapter
from starlette.responses import StreamingResponse

from kqueue.errors import InvalidRequest, KqueueError
from kqueue.http import failures
from kqueue.http.auth import Reader
from kqueue.http.failures import HttpError
from kqueue.http.gateway import CurrentGateway, Gateway
from kqueue.store import reports

_log = logging.getLogger(__name__)

router: Final = APIRouter()

#: Seconds between two reads of a batch, and between two keep-alive comments while nothing happens.
_LOOK_EVERY_S: Final = 1.0
_ALIVE_EVERY_S: Final = 15.0
#: Time by which reads overlap. A verdict has the time at which its transaction began, so it can become visible after
#: a later verdict, by at most the duration of a transaction.
_OVERLAP: Final = timedelta(seconds=60)
_PAGE: Final = 500
#: Prefix of the last event's id. An id is the time of the latest verdict that was sent.
_END: Final = "end-"
_EVENT_SCHEMA: Final = {
    "type": "object",
    "properties": {
        "event": {"enum": ["progress", "verdict", "end"]},
        "data": {"type": "string", "description": "JSON."},
        "id": {"type": "string", "description": "Value for `Last-Event-ID` on reconnection."},
        "retry": {"type": "integer", "minimum": 0},
    },
}
_LISTED: Final = TypeAdapter(reports.Listed)
_BATCH: Final = TypeAdapter(reports.Batch)

#: Name of a batch. It can contain slashes, because users choose it.
BatchName = Annotated[str, Path(min_length=1, max_length=200, pattern=r"^[^\x00]+$", examples=["tuesday"])]


@router.get(
    "/batches/{batch:path}/events",
    response_class=StreamingResponse,
    responses=failures.documented(429)
    | {
        200: {
            "description": "`progress` events (a `Batch`) after each change, `verdict` events (an evaluation in the "
            "form of a list's entry), and an `end` event when all evaluations have their verdicts.",
            "content": {"text/event-stream": {"schema": _EVENT_SCHEMA}},
        },
        204: {"description": "The batch has ended, and all its events were sent before."},
    },
)
async def batch_events(
    batch: BatchName,
    caller: Reader,
    gateway: CurrentGateway,
    last_event_id: Annotated[
        str | None, Header(max_length=100, description="Id of the last event received. The later events are sent.")
    ] = None,
) -> Response:
    """Follow a batch until all its evaluations have their verdicts.

    After a reconnection with `Last-Event-ID` no verdict is missing. Verdicts of the minute before can come twice. Use
    `evaluation_id` to recognise them.
    """
    since = None if not last_event_id else _moment(last_event_id)
    state = await gateway.read(reports.batch_state, batch)
    if state is None:
        raise unknown_batch(batch)
    if last_event_id and last_event_id.startswith(_END) and state.finished_at == since:
        return Response(status_code=204)
    events = gateway.follow(caller, partial(_follow, gateway, batch, since), every_s=_LOOK_EVERY_S)
    return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})


def unknown_batch(batch: str) -> HttpError:
    """Return the error for a batch without evaluations."""
    return HttpError(404, f"no evaluation was submitted under the batch {batch!r}", code="unknown_batch")


async def _follow(
    gateway: Gateway, batch: str, since: datetime | None, looks: AsyncIterable[None]
) -> AsyncGenerator[bytes]:
    """Yield the events after ``since`` that each look finds, until all verdicts are sent."""
    sent: set[UUID] = set()
    last_state: reports.Batch | None = None
    sent_at = time.monotonic()
    yield format_sse_event(retry=1000)
    async for _ in looks:
        try:
            # The state is read first: if it counts all evaluations as finished, the next query returns them all.
            state = await gateway.read(reports.batch_state, batch)
            async for moment, listed in _finished(gateway, batch, since):
                if listed.evaluation_id not in sent:
                    sent.add(listed.evaluation_id)
                    since = max(since or moment, moment)
                    sent_at = time.monotonic()
                    yield _event("verdict", _LISTED.dump_json(listed), since.isoformat())
        except KqueueError as error:
            # The client reconnects by itself.
            _log.warning("the events of the batch %r end early: %s", batch, error)
            return
        if state is not None and state != last_state:
            last_state, sent_at = state, time.monotonic()
            yield _event("progress", _BATCH.dump_json(state))
        if time.monotonic() - sent_at > _ALIVE_EVERY_S:
            sent_at = time.monotonic()
            yield format_sse_event(comment="still there")
        if state is None or state.finished_at is not None:
            yield _event("end", b"{}", None if since is None else _END + since.isoformat())
            return


async def _finished(
    gateway: Gateway, batch: str, since: datetime | None
) -> AsyncGenerator[tuple[datetime, reports.Listed]]:
    """Yield the evaluations that finished after ``since`` or in the overlap before it."""
    after: tuple[datetime, UUID] | None = None
    lower = None if since is None else since - _OVERLAP
    while True:
        page = await gateway.read(reports.finished_in, batch, since=lower, after=after, limit=_PAGE)
        for listed in page:
            assert listed.finished_at is not None, "it is done"
            after = (listed.finished_at, listed.evaluation_id)
            yield listed.finished_at, listed
        if len(page) < _PAGE:
            return


def _event(name: str, data: bytes, identity: str | None = None) -> bytes:
    return format_sse_event(event=name, data_str=data.decode(), id=identity)


def _moment(last_event_id: str) -> datetime:
    try:
        moment = datetime.fromisoformat(last_event_id.removeprefix(_END))
        if moment.tzinfo is None:
            raise ValueError(last_event_id)
        # The overlap before this moment must be a valid time too.
        _ = moment - _OVERLAP
    except (ValueError, OverflowError):
        raise InvalidRequest("Last-Event-ID: this stream did not send it. Omit it to get all events") from None
    return moment
