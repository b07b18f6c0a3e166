"""Parts of a page that are sent again when they change, as server-sent events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Final

from fastapi import Request
from fastapi.sse import format_sse_event
from starlette.responses import StreamingResponse

from kqueue.errors import KqueueError
from kqueue.http.failures import HttpError
from kqueue.http.gateway import Caller, Gateway
from kqueue.store.tokens import Scope
from kqueue.web.route import who

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
    events = gateway.follow(viewer, _events(request, gateway, render))
    return StreamingResponse(events, media_type="text/event-stream")


async def _events(
    request: Request, gateway: Gateway, render: Callable[[], Awaitable[str | None]]
) -> AsyncGenerator[bytes]:
    sent: str | None = None
    sent_at = time.monotonic()
    ends_at = sent_at + gateway.stream_s
    yield format_sse_event(retry=2000)
    while not gateway.stopping.is_set() and time.monotonic() < ends_at:
        try:
            # The stream ends when its session ends or the session's token is revoked.
            caller = await who(request)
            if caller is None or not caller.may(Scope.READ):
                return
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
        with suppress(TimeoutError):
            await asyncio.wait_for(gateway.stopping.wait(), _LOOK_EVERY_S)
