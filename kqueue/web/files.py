"""The files of `static/`, and their URLs."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import Final

#: Media types by file extension.
TYPES: Final = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
#: Contents by file name.
FILES: Final = {
    file.name: file.read_bytes()
    for file in files("kqueue.web").joinpath("static").iterdir()
    if file.name.rpartition(".")[2] in TYPES
}


def address(name: str) -> str:
    """Return a file's URL. It contains a hash of the content, so that browsers can cache the file for ever."""
    return f"/static/{name}?v={hashlib.sha256(FILES[name]).hexdigest()[:12]}"
