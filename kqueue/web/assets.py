"""The style sheet and scripts. They contain nothing about the fleet, so they need no session."""

from __future__ import annotations

from typing import Final

from fastapi import Response

from kqueue.http.failures import HttpError
from kqueue.web.files import FILES, TYPES
from kqueue.web.route import pages

router: Final = pages()
_FOR_EVER: Final = "public, max-age=31536000, immutable"


@router.get("/static/{name}")
async def asset(name: str) -> Response:
    """Return a static file."""
    content = FILES.get(name)
    if content is None:
        raise HttpError(404, "there is no such file")
    media_type = TYPES[name.rpartition(".")[2]]
    return Response(content, media_type=media_type, headers={"Cache-Control": _FOR_EVER})
