"""The files of `static/`, and their addresses."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import Final

#: The media type of each kind of file that is served.
TYPES: Final = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
#: The content of each file.
FILES: Final = {
    file.name: file.read_bytes()
    for file in files("kqueue.web").joinpath("static").iterdir()
    if file.name.rpartition(".")[2] in TYPES
}


def address(name: str) -> str:
    """Return where a file is served. Another content has another address, so browsers may keep it for ever."""
    return f"/static/{name}?v={hashlib.sha256(FILES[name]).hexdigest()[:12]}"
