"""A job: the process of one group's tests, as the controlling pytest sees it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from workers.judge.channel.lines import Lines, content
from workers.judge.sandbox.seal import private_directories
from workers.testing import reaper
from workers.testing.groups import Group, Order, named
from workers.testing.sanitizer import findings

#: How much is read at once, and how much of the last output is kept, in bytes.
_READ_BYTES: Final = 1 << 20
_KEPT_BYTES: Final = 16 << 10
#: Least limit in seconds for what comes before the first test, Python's start and imports too, and after the last.
_AROUND_S: Final = 600.0
#: Seconds in which a keeper says that its program is gone, when all has gone on; then it is killed itself.
_GONE_S: Final = reaper.GRACE_S + 2 * reaper.KILLED_S + 5
#: Frames of pytest and of this package in the traceback of a process that dies.
_FRAME: Final = re.compile(
    r'  File "(.*/(_pytest|pluggy)/.*|.*/workers/testing/(child|sealed)\.py|<frozen runpy>|<string>)"'
)
#: Caches of its own keep one module's faults from another. A home of its own would hide settings and data.
_SHARED: Final = frozenset({"HOME", "XDG_CACHE_HOME", "TMPDIR"})


class Job:
    """A process with tests on this host, and its keeper.

    Attributes:
        sanitized: whether it runs under compute-sanitizer.
        overdue: True once it was ended because it took too long.
        limit_s: most seconds for what it does now, waiting for its device left out.
        status: how the process ended: an exit status, or a signal as a negative number; None while it runs, and if it
            could not be ended.
        sources: what can be read when it has said or printed something.
        why: always empty: how it has ended its status tells, and what has not run of it, nobody.
    """

    why = unrun = ""

    def __init__(
        self,
        group: Group,
        order: dict[str, Any],
        *,
        gpu: str | None,
        lock: Path,
        folder: Path,
        cwd: Path,
        timeout_s: float,
        sanitizer: Sequence[str] = (),
    ) -> None:
        """Start the process.

        Args:
            group: the tests to run.
            order: the fields of :class:`Order` that all processes of the run share.
            gpu: the UUID of its GPU; None where this host shows none.
            lock: the lock of its device.
            folder: for its files and caches; created, and removed at its end but for pytest's temporary directories.
            cwd: its working directory.
            timeout_s: most seconds for a test; infinite for no limit.
            sanitizer: words before the program's, which take a log's name for ``%s``.

        Raises:
            OSError: it could not be started.
        """
        self.overdue = False
        self.status: int | None = None
        self._ended = False
        self._timeout_s = timeout_s
        self._left_s: float | None = None
        self._allow(max(timeout_s, _AROUND_S))
        self._told_at = math.inf
        self._tail = bytearray()
        self._scratch = folder / "scratch"
        self._scratch.mkdir(parents=True)
        self.sanitized = bool(sanitizer)
        self._found = self._scratch / "sanitizer"
        heard, says = socket.socketpair()
        self._printed, prints = os.pipe2(os.O_CLOEXEC)
        self._lines = Lines(heard)
        self.sources = (self._lines.fileno(), self._printed)
        file = self._scratch / "order.json"
        Order(**order, **named(group), basetemp=str(folder / "pytest"), locks=[str(lock)]).write(file)
        program = [word.replace("%s", str(self._found)) for word in sanitizer]
        program += [sys.executable, "-P", "-m", "workers.testing.child", str(file), str(says.fileno())]
        try:
            self._keeper = subprocess.Popen(
                [sys.executable, "-P", "-m", "workers.testing.reaper", str(os.getpid()), str(says.fileno()), *program],
                cwd=cwd,
                env=self._environment(gpu),
                stdin=subprocess.DEVNULL,
                stdout=prints,
                stderr=prints,
                start_new_session=True,
                pass_fds=(says.fileno(),),
            )
        except BaseException:
            self._lines.close()
            os.close(self._printed)
            raise
        finally:
            says.close()
            os.close(prints)
        os.set_blocking(self._printed, False)

    def heard(self) -> Iterator[dict[str, Any]]:
        """Yield what the process has said and was not yielded before, without waiting; end it if it takes too long."""
        for line in self._lines.read():
            with contextlib.suppress(ValueError):  # it died within this line
                if isinstance(word := json.loads(line or b"0"), dict) and isinstance(word.get("at"), str):
                    yield self._noted(word)
        # Now that all it has said is known, however late this process gets to read it.
        if time.monotonic() > self._deadline and not self.overdue and not self._ended:
            self.overdue = True
            self._tell(reaper.ABORT)

    def output(self) -> bytes:
        """Return what the process has printed since the last call, without waiting."""
        chunk = b"".join(self._read(self._printed))
        self._tail += chunk
        del self._tail[:-_KEPT_BYTES]
        return chunk

    @property
    def findings(self) -> str:
        """What compute-sanitizer has found."""
        return findings(self._found)

    @property
    def last_words(self) -> str:
        """The end of what the process printed: captured by pytest for the test that ran, and beside that."""
        parts = [content(captured, _KEPT_BYTES, at_end=True) for captured in self._lines.descriptors]
        parts.append(self._tail.decode(errors="replace"))
        return without_frames("\n".join(part.rstrip("\n") for part in parts))

    def watch(self) -> bool:
        """Return True once the process is gone with all that it started. A keeper that does not end is killed."""
        if time.monotonic() - self._told_at > _GONE_S:
            self._keeper.kill()
        return self._ended or self._keeper.poll() is not None

    def end(self) -> None:
        """Tell the process to end, as Ctrl-C does: fixtures are torn down, then it is killed with all it started."""
        self._tell(reaper.END)

    def close(self) -> None:
        """Wait for the keeper's end and remove the job's files."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._keeper.wait(_GONE_S)
        if self._keeper.poll() is None:
            self._keeper.kill()
            self._keeper.wait()
        self._lines.close()
        os.close(self._printed)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _tell(self, number: signal.Signals) -> None:
        self._told_at = min(self._told_at, time.monotonic())
        self._keeper.send_signal(number)

    def _noted(self, word: dict[str, Any]) -> dict[str, Any]:
        if word["at"] == "start":
            self._allow(self._timeout_s)
        elif word["at"] == "finish":
            self._allow(max(self._timeout_s, _AROUND_S))
        elif word["at"] == "wait" and word.get("on"):
            self._left_s, self._deadline = self._deadline - time.monotonic(), math.inf
        elif word["at"] == "wait" and self._left_s is not None:
            self._left_s, self._deadline = None, time.monotonic() + self._left_s
        if word["at"] == "gone":
            self.status = word.get("status")
            self._ended = True
        return word

    def _allow(self, seconds: float) -> None:
        if not self.overdue:  # the limit that it has passed is told
            self.limit_s, self._deadline = seconds, time.monotonic() + seconds

    def _environment(self, gpu: str | None) -> dict[str, str]:
        """Return this process's environment without kqueue's settings, and with caches and a GPU of its own."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KQUEUE_")}
        own = private_directories(str(self._scratch))
        for name in own.keys() - _SHARED - environment.keys():
            environment[name] = own[name]
        environment["TMPDIR"] = own["TMPDIR"]
        Path(own["TMPDIR"]).mkdir()
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        return environment

    def _read(self, descriptor: int) -> Iterator[bytes]:
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(descriptor, _READ_BYTES):
                yield chunk


def without_frames(text: str) -> str:
    """Return what a process printed at its end without the frames of pytest and of this package."""
    lines = text.replace("\0", "\\x00").splitlines()
    return "\n".join(line for line in lines if not _FRAME.match(line)).strip()
