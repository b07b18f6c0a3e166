"""A repository's files as one reproducible text, which is stored in the place of a problem's source."""

from __future__ import annotations

import base64
import binascii
import io
import lzma
import tarfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from kqueue.contract import TESTS_LINE


class NotAnArchive(Exception):
    """The text contains no repository."""


def pack(root: Path, files: Iterable[PurePosixPath]) -> str:
    """Return the files of a folder packed as text.

    Args:
        files: their relative paths. A link to a file outside the folder is replaced by that file. Broken links and
            links to folders outside are skipped.

    Raises:
        OSError: a file cannot be read.
    """
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz", preset=6, format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(files):
            path = root / name
            link = path.is_symlink() and path.exists()  # a link to itself cannot be followed
            inside = link and path.resolve().is_relative_to(root) and not path.readlink().is_absolute()
            if not inside and not path.is_file():
                continue
            member = tarfile.TarInfo(str(name))
            # Some tests pack files into ZIP archives, which cannot store earlier dates than 1980.
            member.mtime = 1_000_000_000
            if inside:
                member.type, member.linkname = tarfile.SYMTYPE, str(path.readlink())
                tar.addfile(member)
                continue
            with path.open("rb") as file:
                data = file.read()  # read once, because the size must match
            member.size, member.mode = len(data), 0o755 if path.stat().st_mode & 0o100 else 0o644
            tar.addfile(member, io.BytesIO(data))
    return TESTS_LINE + base64.encodebytes(packed.getvalue()).decode()


def unpack(text: str, folder: Path) -> None:
    """Unpack a text into a new folder. Runs in a sealed process, because the text is not trusted.

    Raises:
        NotAnArchive: the text contains no files, or has paths outside the folder.
        OSError: the disk is full, or the folder cannot be written.
    """
    folder.mkdir()
    try:
        packed = base64.b64decode(text.removeprefix(TESTS_LINE), validate=False)
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r:xz") as tar:
            # Set as an attribute, because older versions of Python have no such argument.
            tar.extraction_filter = getattr(tarfile, "data_filter", None)
            tar.extractall(folder)  # noqa: S202 -- in a sealed process
    except (binascii.Error, EOFError, lzma.LZMAError, tarfile.TarError) as error:
        raise NotAnArchive(f"the repository's files cannot be unpacked: {error}") from None
