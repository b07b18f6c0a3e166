"""Charts on pages: drawn in a thread of their own, in the theme that a browser asks for."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from hashlib import sha256
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
#: The most bytes of the pictures that are kept, those that were asked for last.
_KEPT_BYTES: Final = 32 << 20
#: A browser that shows a page again soon asks for no new picture.
_FRESH: Final = "private, max-age=20"


class Drawn:
    """The pictures that were drawn last, by all that they show: whatever changes that makes another picture of it.

    For one thread.
    """

    def __init__(self, most_bytes: int) -> None:
        """Keep so many bytes of pictures at most."""
        self._most_bytes = most_bytes
        self._bytes = 0
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()

    def picture(self, chart: Chart, theme: Theme) -> bytes:
        """Return a chart as SVG.

        Raises:
            ConfigError: it cannot be drawn here.
        """
        # Equal charts write the same, and others do not: a chart is nothing but texts, numbers, times and ids.
        shown = sha256(repr((theme, chart)).encode("utf-8", "surrogatepass")).digest()
        content = self._kept.pop(shown, None)
        if content is None:
            content = render(chart, theme=theme)
            self._bytes += len(content)
        self._kept[shown] = content
        while self._bytes > self._most_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= len(oldest)
        return content


_drawn: Final = Drawn(_KEPT_BYTES)


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
    drawing = _DRAWER.submit(_drawn.picture, chart, theme)
    # Not when the request ends: a chart that is being drawn goes on without whoever asked for it.
    drawing.add_done_callback(lambda _: _places.release())
    try:
        content = await asyncio.wrap_future(drawing)
    except ConfigError as error:
        raise HttpError(404, str(error)) from None
    return Response(content, media_type="image/svg+xml", headers={"Cache-Control": _FRESH})
