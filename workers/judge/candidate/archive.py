"""A repository's files as one text, the same for the same files. It is stored in the place of a problem."""

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
    """A text holds no repository."""


def pack(root: Path, files: Iterable[PurePosixPath]) -> str:
    """Return files as a text.

    Args:
        root: the folder that they lie in.
        files: their paths there. Links that lead out of it to files are followed; broken ones, and those that lead out
            to folders, are left out.

    Raises:
        OSError: one cannot be read.
    """
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz", preset=6, format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(files):
            path = root / name
            link = path.is_symlink() and path.exists()  # one that leads to itself cannot be followed
            inside = link and path.resolve().is_relative_to(root) and not path.readlink().is_absolute()
            if not inside and not path.is_file():
                continue
            member = tarfile.TarInfo(str(name))
            # Older files cannot be put into a ZIP archive, as some tests do.
            member.mtime = 1_000_000_000
            if inside:
                member.type, member.linkname = tarfile.SYMTYPE, str(path.readlink())
                tar.addfile(member)
                continue
            with path.open("rb") as file:
                data = file.read()  # its size must not change meanwhile
            member.size, member.mode = len(data), 0o755 if path.stat().st_mode & 0o100 else 0o644
            tar.addfile(member, io.BytesIO(data))
    return TESTS_LINE + base64.encodebytes(packed.getvalue()).decode()


def unpack(text: str, folder: Path) -> None:
    """Make a folder with the files of a text. It runs in a sealed process: the text may be anybody's.

    Raises:
        NotAnArchive: it holds no files, or such as would lie elsewhere.
        OSError: there is no room for them.
    """
    folder.mkdir()
    try:
        packed = base64.b64decode(text.removeprefix(TESTS_LINE), validate=False)
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r:xz") as tar:
            # By its own name, as an older Python has no such argument.
            tar.extraction_filter = getattr(tarfile, "data_filter", None)
            tar.extractall(folder)  # noqa: S202 -- in a sealed process
    except (binascii.Error, EOFError, lzma.LZMAError, tarfile.TarError) as error:
        raise NotAnArchive(f"the repository's files cannot be unpacked: {error}") from None
