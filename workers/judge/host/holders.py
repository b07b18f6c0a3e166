"""Who else has a device: processes of other fleets and local judges, which share its lock."""

from __future__ import annotations

import contextlib
import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from workers.judge.host import linux

#: The most characters of a command.
_COMMAND: Final = 120


@dataclass(frozen=True, slots=True)
class Holder:
    """What has a device's lock, and is no part of this process's fleet.

    Attributes:
        words: which process it is and who started it.
        keeps_waiting: the processes of this fleet that wait for the lock.
    """

    words: str
    keeps_waiting: frozenset[int]


def stranger(lock: Path) -> Holder | None:
    """Return who has a device's lock; None if nobody has, one of this process's fleet does, or it cannot be seen.

    Args:
        lock: the lock's file.
    """
    try:
        found = lock.stat()
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    place, behind = _place(found), ""
    with contextlib.suppress(OSError):
        behind = _place(lock.with_suffix(".queue").stat())
    # As in "1: FLOCK ADVISORY WRITE 812 fe:00:4711 0 EOF"; who waits has "->" before its kind.
    fields = [words for words in (line.split() for line in lines) if place in words or behind in words]
    holder = next((int(words[4]) for words in fields if words[1] != "->" and place in words), 0)
    ours = _root(os.getpid())
    if holder <= 0 or (root := _root(holder)) == ours:
        return None
    waiting = (int(words[5]) for words in fields if words[1] == "->")
    starter = linux.parent(root)
    by = f", started by process {starter} ({_command(starter)})" if starter else ""
    return Holder(f"process {root} ({_command(root)}){by}", frozenset(pid for pid in waiting if _root(pid) == ours))


def _place(found: os.stat_result) -> str:
    """Return a file's name among the locks of Linux."""
    return f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"


def _root(pid: int) -> int:
    """Return the process that a judge's fleet or local judge descends from: the uppermost that runs our code."""
    root = pid
    at: int | None = pid
    while at is not None:
        if any(word.startswith("workers.") for word in _words(at)):
            root = at
        at = linux.parent(at)
    return root


def _command(pid: int) -> str:
    """Return a process's program, and the module or script that Python runs: other arguments may be secrets."""
    program, *rest = _words(pid) or [""]
    words = [Path(program).name]
    if words[0].startswith("python"):
        options = list(itertools.takewhile(lambda word: word.startswith("-") and word not in ("-m", "-c"), rest))
        match rest[len(options) :]:
            case ["-m", module, *_]:
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
