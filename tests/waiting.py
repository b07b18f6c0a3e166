"""Functions that wait for conditions, work in the background, and inspect processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from workers.judge.host import linux


def until(look: Callable[[], Any], timeout_s: float = 60.0, what: str = "it") -> Any:
    """Poll until ``look`` returns a true value, and return it."""
    begun = time.monotonic()
    while not (seen := look()):
        waited = time.monotonic() - begun
        if waited > timeout_s:
            raise AssertionError(f"{what} did not come within {timeout_s} s")
        # Many looks query a database or a server, which takes a core from what is waited for.
        time.sleep(min(0.02 + waited / 20, 0.15))
    return seen


@contextmanager
def repeated(work: Callable[[], object], every_s: float = 0.02) -> Generator[None]:
    """Call a function again and again in a thread until the block ends."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(every_s):
            work()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def proc(pid: int, file: str) -> str:
    """Return a file of a process in /proc. Empty if the process has exited, as any listed process may have."""
    try:
        return Path(f"/proc/{pid}/{file}").read_text(errors="replace")
    except OSError:
        return ""


def below(pid: int) -> Iterator[int]:
    """Yield all descendants of a process, including zombies. Parents come before their children."""
    for child in linux.children(pid):
        yield child
        yield from below(child)


def waits(pid: int) -> bool:
    """Return whether a process is a prewarmed candidate without a kernel."""
    return proc(pid, "comm") == "kq-candidate\n" and not Path(f"/proc/{pid}/cwd/kernel.py").exists()
