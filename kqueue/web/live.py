"""Parts of a page that are sent again when they change, as server-sent events."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from functools import partial
from typing import Final

from fastapi import Request
from fastapi.sse import format_sse_event
from starlette.responses import StreamingResponse

from kqueue.errors import KqueueError
from kqueue.http.failures import HttpError
from kqueue.http.gateway import Caller, Gateway

_log = logging.getLogger(__name__)

#: Seconds between two renderings, and between two keep-alive comments while nothing changes.
_LOOK_EVERY_S: Final = 2.0
_ALIVE_EVERY_S: Final = 15.0


def live(request: Request, viewer: Caller, render: Callable[[], Awaitable[str | None]]) -> StreamingResponse:
    """Return a stream of ``html`` events, one for each change of a part of a page.

    It ends with the event ``over`` after the last change, and without an event when the viewer's session ends.

    ``render`` returns the part's HTML, or None after the last change. A viewer with too many open streams gets an
    HttpError 429.
    """
    gateway: Gateway = request.app.state.gateway
    events = gateway.follow(viewer, partial(_events, request, render), every_s=_LOOK_EVERY_S)
    return StreamingResponse(events, media_type="text/event-stream")


async def _events(
    request: Request, render: Callable[[], Awaitable[str | None]], looks: AsyncIterable[None]
) -> AsyncGenerator[bytes]:
    sent: str | None = None
    sent_at = time.monotonic()
    yield format_sse_event(retry=2000)
    async for _ in looks:
        try:
            html = await render()
        except (KqueueError, HttpError) as error:
            # The browser reconnects by itself.
            _log.warning("the events of %r end early: %s", request.scope["path"], error)
            return
        if html is None:
            yield format_sse_event(event="over", data_str="")
            return
        if html != sent:
            sent, sent_at = html, time.monotonic()
            yield format_sse_event(event="html", data_str=html)
        elif time.monotonic() - sent_at > _ALIVE_EVERY_S:
            sent_at = time.monotonic()
            yield format_sse_event(comment="still there")
