"""Charts on pages: drawn in a thread of their own, in the theme that a browser asks for."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from importlib.util import find_spec
from typing import Final

from fastapi import Response

from kqueue.charts import Chart, Theme, render
from kqueue.errors import ConfigError
from kqueue.http.failures import HttpError

#: Charts are drawn one at a time anyhow, and no other request waits for them.
_DRAWER: Final = ThreadPoolExecutor(1, thread_name_prefix="draw")
#: A browser that shows a page again soon asks for no new picture.
_FRESH: Final = "private, max-age=20"


@cache
def can_draw() -> bool:
    """Return True if charts can be drawn here."""
    return find_spec("matplotlib") is not None


async def picture(chart: Chart, theme: Theme) -> Response:
    """Return a chart as SVG.

    Raises:
        HttpError: 404, it cannot be drawn here.
    """
    try:
        content = await asyncio.get_running_loop().run_in_executor(_DRAWER, partial(render, chart, theme=theme))
    except ConfigError as error:
        raise HttpError(404, str(error)) from None
    return Response(content, media_type="image/svg+xml", headers={"Cache-Control": _FRESH})
