"""Charts on pages: drawn in a thread of their own, in the theme that a browser asks for."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from importlib.util import find_spec
from threading import BoundedSemaphore
from typing import Final

from fastapi import Response

from kqueue.charts import Chart, Theme, render
from kqueue.errors import ConfigError
from kqueue.http.failures import HttpError

#: Charts are drawn one at a time anyhow, and no other request waits for them.
_DRAWER: Final = ThreadPoolExecutor(1, thread_name_prefix="draw")
#: The most charts that are drawn or wait for it. One takes a tenth of a second, and whoever waits longer has gone.
_MOST: Final = 20
_places: Final = BoundedSemaphore(_MOST)
#: A browser that shows a page again soon asks for no new picture.
_FRESH: Final = "private, max-age=20"


@cache
def can_draw() -> bool:
    """Return True if charts can be drawn here."""
    return find_spec("matplotlib") is not None


async def picture(chart: Chart, theme: Theme) -> Response:
    """Return a chart as SVG.

    Raises:
        HttpError: 404, it cannot be drawn here; 503, too many others wait.
    """
    if not _places.acquire(blocking=False):
        raise HttpError(503, "too many charts are being drawn: ask again", code="too_many_charts")
    drawing = _DRAWER.submit(partial(render, chart, theme=theme))
    # Not when the request ends: a chart that is being drawn goes on without whoever asked for it.
    drawing.add_done_callback(lambda _: _places.release())
    try:
        content = await asyncio.wrap_future(drawing)
    except ConfigError as error:
        raise HttpError(404, str(error)) from None
    return Response(content, media_type="image/svg+xml", headers={"Cache-Control": _FRESH})
