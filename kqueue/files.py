"""Files that users name. Any path can be given, also of something that is not a file or never ends."""

from __future__ import annotations

import stat
from pathlib import Path

from kqueue.errors import InvalidRequest


def read_bytes(path: Path, most: int, what: str = "a source") -> bytes:
    """Return the content of a file of at most ``most`` bytes, or raise InvalidRequest. ``what`` is in its message."""
    try:
        mode = path.stat().st_mode
        data = b""
        if is_file := stat.S_ISREG(mode) or stat.S_ISDIR(mode):  # opening a folder gives the error
            with path.open("rb") as file:
                data = file.read(most + 1)
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if not is_file:
        raise InvalidRequest(f"{path}: not a regular file: save its content in one")
    if len(data) > most:
        raise InvalidRequest(f"{path}: larger than {most} bytes, the limit for {what}")
    return data


def read_text(path: Path, most: int) -> str:
    """Return the text of a file of at most ``most`` bytes, or raise InvalidRequest."""
    data = read_bytes(path, most)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"{path}: not UTF-8 text (byte 0x{data[error.start]:02x} at offset {error.start}): save it as UTF-8"
        ) from None
