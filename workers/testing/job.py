"""A job: the process of one group's tests, as the controlling pytest sees it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from workers.judge.sandbox.seal import private_directories
from workers.testing import keeper
from workers.testing.groups import Group, Order
from workers.testing.places import Place

#: How much is read at once, and how much of the last output is kept, in bytes.
_READ_BYTES: Final = 1 << 20
_KEPT_BYTES: Final = 16 << 10
#: Least limit in seconds for what comes before the first test, Python's start and imports too, and after the last.
_AROUND_S: Final = 600.0
#: Seconds in which a keeper says that its program is gone, when all has gone on; then it is killed itself.
_GONE_S: Final = keeper.GRACE_S + 2 * keeper.KILLED_S + 5
#: Frames of pytest and of this package in the traceback of a process that dies.
_FRAME: Final = re.compile(r'  File "(.*/(_pytest|pluggy)/.*|.*/workers/testing/child\.py|<frozen runpy>)"')
#: Caches of its own keep one module's faults from another. A home of its own would hide settings and data.
_SHARED: Final = frozenset({"HOME", "XDG_CACHE_HOME", "TMPDIR"})


class Job:
    """A process with tests, and its keeper.

    Attributes:
        place: where it runs.
        group: the tests that it runs.
        sanitized: the file in which compute-sanitizer says what it finds; None without it.
        overdue: True once it was ended because it took too long.
        limit_s: most seconds for what it does now, waiting for its device left out.
        status: how the process ended: an exit status, or a signal as a negative number; None while it runs, and if it
            could not be ended.
        said: descriptor to read what it says.
        printed: descriptor to read what it prints beside that.
    """

    def __init__(
        self,
        group: Group,
        place: Place,
        order: dict[str, Any],
        *,
        folder: Path,
        cwd: Path,
        timeout_s: float,
        sanitizer: Sequence[str] = (),
    ) -> None:
        """Start the process.

        Args:
            group: the tests to run.
            place: where to run them.
            order: the fields of :class:`Order` that all jobs share.
            folder: for its files and caches; created, and removed at its end but for pytest's temporary directories.
            cwd: its working directory.
            timeout_s: most seconds for a test; infinite for no limit.
            sanitizer: words before the program's, which take a log's name for ``%s``.

        Raises:
            OSError: it could not be started.
        """
        self.group = group
        self.place = place
        self.overdue = False
        self.status: int | None = None
        self._ended = False
        self._timeout_s = timeout_s
        self._left_s: float | None = None
        self._allow(max(timeout_s, _AROUND_S))
        self._told_at = math.inf
        self._line = bytearray()
        self._tail = bytearray()
        self._captured: list[int] = []
        self._scratch = folder / "scratch"
        self._scratch.mkdir(parents=True)
        self.sanitized = self._scratch / "sanitizer" if sanitizer else None
        self.said, says = os.pipe2(os.O_CLOEXEC)
        self.printed, prints = os.pipe2(os.O_CLOEXEC)
        names = [item.nodeid for item in group.items]
        most = max(map(names.count, set(names)))
        file = self._scratch / "order.json"
        Order(
            **order,
            tests=names,
            files=list(dict.fromkeys(str(item.path) for item in group.items)) * most,
            basetemp=str(folder / "pytest"),
            locks=[str(place.lock)],
            said=says,
        ).write(file)
        program = [word.replace("%s", str(self.sanitized)) for word in sanitizer]
        program += [sys.executable, "-P", "-m", "workers.testing.child", str(file)]
        try:
            self._keeper = subprocess.Popen(
                [sys.executable, "-P", "-m", "workers.testing.keeper", str(os.getpid()), str(says), *program],
                cwd=cwd,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=prints,
                stderr=prints,
                start_new_session=True,
                pass_fds=(says,),
            )
        except BaseException:
            os.close(self.said)
            os.close(self.printed)
            raise
        finally:
            os.close(says)
            os.close(prints)
        for descriptor in (self.said, self.printed):
            fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_NONBLOCK)

    def heard(self) -> Iterator[dict[str, Any]]:
        """Yield what the process has said and was not yielded before, without waiting; end it if it takes too long."""
        for chunk in self._read(self.said):
            self._line += chunk
            *lines, rest = self._line.split(b"\n")
            self._line = rest
            for line in lines:
                with contextlib.suppress(ValueError):  # it died within this line
                    if isinstance(word := json.loads(line or b"0"), dict):
                        yield self._noted(word)
        # Now that all it has said is known, however late this process gets to read it.
        if time.monotonic() > self._deadline and not self.overdue and not self._ended:
            self.overdue = True
            self._tell(keeper.ABORT)

    def output(self) -> bytes:
        """Return what the process has printed since the last call, without waiting."""
        chunk = b"".join(self._read(self.printed))
        self._tail += chunk
        del self._tail[:-_KEPT_BYTES]
        return chunk

    @property
    def last_words(self) -> str:
        """The end of what the process printed: captured by pytest for the test that ran, and beside that."""
        parts = [_end_of(descriptor) for descriptor in self._captured] + [bytes(self._tail)]
        texts = [part.decode(errors="replace").replace("\0", "\\x00").splitlines() for part in parts]
        lines = [line for lines in texts for line in lines if not _FRAME.match(line)]
        return "\n".join(lines).strip()

    def watch(self) -> bool:
        """Return True once the process is gone with all that it started. A keeper that does not end is killed."""
        if time.monotonic() - self._told_at > _GONE_S:
            self._keeper.kill()
        return self._ended or self._keeper.poll() is not None

    def end(self) -> None:
        """Tell the process to end, as Ctrl-C does: fixtures are torn down, then it is killed with all it started."""
        self._tell(keeper.END)

    def close(self) -> None:
        """Wait for the keeper's end and remove the job's files."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._keeper.wait(_GONE_S)
        if self._keeper.poll() is None:
            self._keeper.kill()
            self._keeper.wait()
        for descriptor in (self.said, self.printed, *self._captured):
            os.close(descriptor)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _tell(self, number: signal.Signals) -> None:
        self._told_at = min(self._told_at, time.monotonic())
        self._keeper.send_signal(number)

    def _noted(self, word: dict[str, Any]) -> dict[str, Any]:
        if word["at"] == "start":
            self._allow(self._timeout_s)
        elif word["at"] == "finish":
            self._allow(max(self._timeout_s, _AROUND_S))
        elif word["at"] == "wait" and word["on"]:
            self._left_s, self._deadline = self._deadline - time.monotonic(), math.inf
        elif word["at"] == "wait" and self._left_s is not None:
            self._left_s, self._deadline = None, time.monotonic() + self._left_s
        if word["at"] == "capture" and not self._captured:
            with contextlib.suppress(OSError):  # it is gone already
                for number in word["files"]:
                    self._captured.append(os.open(f"/proc/{word['pid']}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC))
        if word["at"] == "gone":
            self.status = word["status"]
            self._ended = True
        return word

    def _allow(self, seconds: float) -> None:
        if not self.overdue:  # the limit that it has passed is told
            self.limit_s, self._deadline = seconds, time.monotonic() + seconds

    def _environment(self) -> dict[str, str]:
        """Return this process's environment without kqueue's settings, and with caches and a GPU of its own."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KQUEUE_")}
        own = private_directories(str(self._scratch))
        for name in own.keys() - _SHARED - environment.keys():
            environment[name] = own[name]
        environment["TMPDIR"] = own["TMPDIR"]
        Path(own["TMPDIR"]).mkdir()
        if self.place.gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self.place.gpu
        return environment

    def _read(self, descriptor: int) -> Iterator[bytes]:
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(descriptor, _READ_BYTES):
                yield chunk


def _end_of(descriptor: int) -> bytes:
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, _KEPT_BYTES, max(0, size - _KEPT_BYTES))
