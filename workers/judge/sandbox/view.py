"""The directories that a candidate with its own uid must be able to read.

Sometimes only the fleet's user can enter the directory of the interpreter and its packages, for example root's home. If
it can mount, a fork server then builds a private view, which replaces that directory by an empty one with only the
interpreter and its packages. Otherwise the candidate keeps the fleet's uid, and the verdict records that.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import stat
import sys
from pathlib import Path

from kqueue import folders
from workers.judge.host import linux


def needed() -> list[Path]:
    """Return the directories that a candidate reads: interpreter, packages, compilers."""
    paths = {Path(sys.prefix), Path(sys.base_prefix), Path(__file__).parents[3]}
    # Found without an import of torch, because the supervisor calls this too.
    if (torch := importlib.util.find_spec("torch")) is not None and torch.origin is not None:
        paths.add(Path(torch.origin).parent)
    paths |= {Path(entry) for entry in sys.path}
    if (toolkit := _toolkit()) is not None:
        paths.add(toolkit)
    return sorted({path.resolve() for path in paths if not folders.fault(path)})


def _toolkit() -> Path | None:
    """Return CUDA's directory, which nvcc needs, with the search order of torch's extension builder."""
    if home := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return Path(home)
    nvcc = shutil.which("nvcc")
    home = Path(nvcc).resolve().parent.parent if nvcc else None
    # A script named nvcc is not enough, because the directory becomes readable.
    return home if home is not None and not folders.fault(home / "nvvm") else None


def obstacle(path: Path) -> Path | None:
    """Return the first directory on the way to ``path`` that other users cannot traverse, or None."""
    for part in [*reversed(path.parents), path]:
        mode = part.stat().st_mode
        if not mode & stat.S_IXOTH:
            return part
    return None


def unreadable() -> dict[Path, list[Path]]:
    """Return the needed directories that other users cannot reach, grouped by the directory that prevents it."""
    blocked: dict[Path, list[Path]] = {}
    for path in needed():
        if (where := obstacle(path)) is not None:
            blocked.setdefault(where, []).append(path)
    return blocked


def rebuild() -> None:
    """Give this process a private view in which all users can read :func:`needed`. Raise OSError if it cannot mount."""
    blocked = unreadable()
    if not blocked:
        return
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount(None, "/", None, linux.MS_REC | linux.MS_PRIVATE)
    for where, paths in blocked.items():
        # The new mount hides the old directories, but open descriptors still give access to them.
        outermost = [path for path in paths if not any(other in path.parents for other in paths)]
        descriptors = {path: os.open(path, os.O_PATH | os.O_DIRECTORY) for path in outermost}
        linux.mount("tmpfs", str(where), "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=0755,size=1m")
        for path, descriptor in descriptors.items():
            path.mkdir(parents=True, mode=0o755, exist_ok=True)
            linux.mount(f"/proc/self/fd/{descriptor}", str(path), None, linux.MS_BIND | linux.MS_REC)
            os.close(descriptor)
