"""Processes that are kept for later evaluations: references, and a prepared candidate without any source."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from workers.judge.channel.packets import send_with_fds
from workers.judge.forkserver import control
from workers.judge.forkserver.control import End, Keep, Take
from workers.judge.forkserver.orphans import has_ended
from workers.judge.forkserver.watch import Sealed, Watch
from workers.judge.host import uids
from workers.judge.sandbox.seal import Role

#: Maximum number of kept references. One more can be working, and each has a separate uid.
_MOST_KEPT: Final = len(uids.REFERENCE_OFFSETS) - 2
#: Seconds between two checks of a kept process. Kept processes are idle and can be many.
IDLE: Final = 0.5
#: Maximum CPU time of a kept process: a constant in seconds plus a share of the elapsed time. More would disturb the
#: timing of other processes. Threads of libraries spin for a moment before they sleep.
_RESTLESS: Final = (4.0, 0.1)


@dataclass(slots=True)
class _Kept:
    """A kept process that waits for its next evaluation.

    Attributes:
        request: the judge's request.
        descriptors: the judge's ends of its channel and control socket, its page of flags, and on a CPU its memory.
        since: monotonic time of the request.
        wanted: time stamp in nanoseconds of the file ``request.wanted`` at that time.
        worked: CPU time in seconds that the process had used at that time.
    """

    request: Keep
    descriptors: list[int]
    since: float = field(default_factory=time.monotonic)
    wanted: int = 0
    worked: float = 0.0

    def __post_init__(self) -> None:
        self.wanted = self.last_wanted()

    def last_wanted(self) -> int:
        """Return when another process last needed the memory, in nanoseconds of the file's clock, or 0 for never."""
        try:
            return Path(self.request.wanted).stat().st_mtime_ns
        except FileNotFoundError:
            return 0


class KeptProcesses:
    """The kept processes, the longest waiting first. They stay under the watch."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._kept: list[_Kept] = []
        self._looked = 0.0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def directories(self) -> set[str]:
        """The processes' private directories, which identify them."""
        return {kept.request.scratch for kept in self._kept}

    def is_due(self, now: float) -> bool:
        """Return whether it is time to check the processes."""
        return now - self._looked >= IDLE

    def check(self, now: float, orphans: list[int]) -> None:
        """End the processes whose time is over, whose memory is needed, or that use CPU time."""
        self._looked = now
        for kept in [each for each in self._kept if self._is_over(each, now, orphans)]:
            self._end(kept)

    def end_all(self) -> None:
        """End all processes, because a group needs their uids and memory."""
        for kept in list(self._kept):
            self._end(kept)

    def _is_over(self, kept: _Kept, now: float, orphans: list[int]) -> bool:
        if now > kept.since + kept.request.seconds or kept.last_wanted() != kept.wanted:
            return True
        process, (most, share) = self._process_of(kept), _RESTLESS
        if process is None:
            return True
        return process.cpu_seconds(orphans) - kept.worked > most + share * (time.monotonic() - kept.since)

    def keep(self, request: Keep, descriptors: list[int]) -> None:
        """Keep a process. If there are too many references, end the one that waits longest."""
        kept = _Kept(request, descriptors)
        self._kept.append(kept)
        process = self._process_of(kept)
        if process is None:
            self._end(kept)
            return
        kept.worked = process.cpu_seconds(self._watch.children.orphans())
        roles = ((each, self._process_of(each)) for each in self._kept)
        references = [each for each, process in roles if process and process.profile.role is Role.REFERENCE]
        if len(references) > _MOST_KEPT:
            self._end(references[0])

    def hand_over(self, request: Take, answer: socket.socket) -> None:
        """Send the process that is kept under a key to a judge, if there is one."""
        for kept in [kept for kept in self._kept if kept.request.key == request.key]:
            if (process := self._process_of(kept)) is not None:
                process.about = request.about
                reply = replace(kept.request, cpu_s=process.cpu_seconds(self._watch.children.orphans()))
                with contextlib.suppress(OSError):  # the judge is gone, so the closed sockets below end the process
                    send_with_fds(answer, control.pack(reply), kept.descriptors)
                self._forget(kept)
                return
            self._end(kept)

    def _process_of(self, kept: _Kept) -> Sealed | None:
        """Return the kept process, if it still runs."""
        running = (each for each in self._watch.running.values() if each.profile.scratch == kept.request.scratch)
        return next((each for each in running if not has_ended(each.pid)), None)

    def _end(self, kept: _Kept) -> None:
        process = self._process_of(kept)
        self._forget(kept)
        if process is not None:
            self._watch.end(process, End.STOPPED)

    def _forget(self, kept: _Kept) -> None:
        self._kept.remove(kept)
        for descriptor in kept.descriptors:
            os.close(descriptor)
