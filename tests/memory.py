"""Search of a process's memory."""

from __future__ import annotations

import mmap
import re


def held(pid: int, pattern: bytes) -> bool:
    """Return whether a process's writable memory contains a pattern."""
    mark = re.compile(pattern)
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:  # noqa: PTH123
        for line in maps:
            where, rights = line.split()[:2]
            begin, end = (int(number, 16) for number in where.split("-"))
            if not rights.startswith("r") or "[v" in line or ("w" not in rights and "[stack" not in line):
                continue
            tail = b""
            for at in range(begin, end, 16 << 20):
                memory.seek(at)
                try:
                    part = memory.read(min(end - at, 16 << 20))
                except OSError:
                    break
                if mark.search(tail + part):
                    return True
                tail = part[-mmap.PAGESIZE :]
    return False
