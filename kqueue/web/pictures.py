"""Charts on pages, drawn in a separate thread and in the theme that the browser requests."""

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

#: The thread that draws charts. They are drawn one at a time, because rendering holds a lock.
_DRAWER: Final = ThreadPoolExecutor(1, thread_name_prefix="draw")
#: Maximum number of charts that are being drawn or wait. One takes 0.1 s, so that no viewer waits longer than 2 s.
_MOST: Final = 20
_places: Final = BoundedSemaphore(_MOST)
#: Maximum bytes of cached pictures.
_KEPT_BYTES: Final = 32 << 20
#: Header that lets a browser show a picture again for 20 s without a new request.
_FRESH: Final = "private, max-age=20"


class Drawn:
    """A cache of the pictures that were requested last, keyed by their content. Only one thread can use it."""

    def __init__(self, most_bytes: int) -> None:
        """Create a cache for at most ``most_bytes`` bytes of pictures."""
        self._most_bytes = most_bytes
        self._bytes = 0
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()

    def picture(self, chart: Chart, theme: Theme) -> bytes:
        """Return a chart as SVG, or raise ConfigError without matplotlib."""
        # Charts with the same repr are equal, because a chart contains only texts, numbers, times and ids.
        key = sha256(repr((theme, chart)).encode("utf-8", "surrogatepass")).digest()
        content = self._kept.pop(key, None)
        if content is None:
            content = render(chart, theme=theme)
            self._bytes += len(content)
        self._kept[key] = content
        while self._bytes > self._most_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= len(oldest)
        return content


_drawn: Final = Drawn(_KEPT_BYTES)


@cache
def can_draw() -> bool:
    """Return True if matplotlib is installed."""
    return find_spec("matplotlib") is not None


async def picture(chart: Chart, theme: Theme) -> Response:
    """Return a chart as SVG. Raise an HttpError 404 without matplotlib, and 503 if too many charts wait."""
    if not _places.acquire(blocking=False):
        raise HttpError(503, "too many charts are being drawn: try again", code="too_many_charts")
    drawing = _DRAWER.submit(_drawn.picture, chart, theme)
    # The end of the drawing releases the slot, because the drawing continues after its request ends.
    drawing.add_done_callback(lambda _: _places.release())
    try:
        content = await asyncio.wrap_future(drawing)
    except ConfigError as error:
        raise HttpError(404, str(error)) from None
    return Response(content, media_type="image/svg+xml", headers={"Cache-Control": _FRESH})
