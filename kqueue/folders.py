"""Folders in environment variables. A user can set anything there, so unusable entries are skipped."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

#: Variables with a folder or a list of folders, in which programs and libraries are searched.
VARIABLES: Final = ("PATH", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH")


def fault(entry: str | Path) -> str:
    """Return the reason why nothing can be found in a folder, or an empty string."""
    if not Path(entry).is_absolute():
        return "not an absolute path"
    try:
        is_folder = stat.S_ISDIR(Path(entry).stat().st_mode)
    except OSError as error:
        return os.strerror(error.errno or errno.EIO)
    if not is_folder:
        return os.strerror(errno.ENOTDIR)
    return "" if os.access(entry, os.X_OK) else os.strerror(errno.EACCES)


def usable(entries: str) -> str:
    """Return a variable's list with each usable folder once."""
    return os.pathsep.join(dict.fromkeys(entry for entry in entries.split(os.pathsep) if not fault(entry)))
