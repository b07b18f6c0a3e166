"""The holder of a device's lock: a process of another fleet or local judge, which shares the lock."""

from __future__ import annotations

import contextlib
import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from workers.judge.host import linux

#: Maximum length in characters of a reported command.
_COMMAND: Final = 120


@dataclass(frozen=True, slots=True)
class Holder:
    """A process outside this fleet that holds the device's lock: its description, and the pids that wait here."""

    words: str
    keeps_waiting: frozenset[int]


def stranger(lock: Path) -> Holder | None:
    """Return the foreign holder of a device's lock, or None if there is none or it cannot be seen."""
    try:
        status = lock.stat()
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    name, behind = _lock_name(status), ""
    with contextlib.suppress(OSError):
        behind = _lock_name(lock.with_suffix(".queue").stat())
    # A line is "1: FLOCK ADVISORY WRITE 812 fe:00:4711 0 EOF". A waiting process has "->" before the kind.
    fields = [words for words in (line.split() for line in lines) if name in words or behind in words]
    holder = next((int(words[4]) for words in fields if words[1] != "->" and name in words), 0)
    ours = _root(os.getpid())
    if holder <= 0 or (root := _root(holder)) == ours:
        return None
    waiting = (int(words[5]) for words in fields if words[1] == "->")
    starter = linux.parent(root)
    by = f", started by process {starter} ({_command(starter)})" if starter else ""
    return Holder(f"process {root} ({_command(root)}){by}", frozenset(pid for pid in waiting if _root(pid) == ours))


def _lock_name(status: os.stat_result) -> str:
    """Return the name of a file in ``/proc/locks``."""
    return f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"


def _root(pid: int) -> int:
    """Return the root process of a fleet or local judge: the topmost ancestor that runs this project's code."""
    root = pid
    at: int | None = pid
    while at is not None:
        if any(word.startswith("workers.") for word in _words(at)):
            root = at
        at = linux.parent(at)
    return root


def _command(pid: int) -> str:
    """Return a process's program, and the module or script that Python runs. Other arguments can contain secrets."""
    program, *rest = _words(pid) or [""]
    words = [Path(program).name]
    if words[0].startswith("python"):
        options = list(itertools.takewhile(lambda word: word.startswith("-") and word not in ("-m", "-c"), rest))
        match rest[len(options) :]:
            case ["-m", module, *_] | [_, module, *_] if rest[len(options)] == "-m" or module.startswith("workers."):
                words += ["-m", module]
            case [script, *_] if script != "-c":
                words.append(Path(script).name)
            case _:
                pass
    return " ".join(words)[:_COMMAND]


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []
