"""This host as a runner of tests: slots on its GPUs, and a job, which is the process of one group's tests.

A slot has the lock of its GPU, which a local fleet holds while it times kernels.
"""

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
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from kqueue import program
from kqueue.config import load
from workers.judge.channel.lines import Lines, content
from workers.judge.gpu.devices import choose, devices
from workers.judge.host import scratch
from workers.judge.sandbox.seal import private_directories
from workers.testing import reaper, sanitizer
from workers.testing.groups import Group, Order, named

#: Bytes that are read at once, and bytes of the last output that are kept.
_READ_BYTES: Final = 1 << 20
_KEPT_BYTES: Final = 16 << 10
#: Least limit in seconds on the time before the first test, imports included, and after the last test.
_AROUND_S: Final = 600.0
#: Seconds in which a reaper reports the end of its program if nothing hangs. After that it is killed itself.
_GONE_S: Final = reaper.GRACE_S + 2 * reaper.KILLED_S + 5
#: Frames of pytest and of this package in the traceback of a process that dies.
_FRAME: Final = re.compile(
    r'  File "(.*/(_pytest|pluggy)/.*|.*/workers/testing/(child|sealed)\.py|<frozen runpy>|<string>)"'
)
#: Directories that a job does not get privately. Private caches keep one module's faults from another module, but a
#: private home would hide settings and data. TMPDIR is always private.
_SHARED: Final = frozenset({"HOME", "XDG_CACHE_HOME", "TMPDIR"})


@dataclass(frozen=True, slots=True)
class TestSlot:
    """A slot for one process of tests: its GPU's UUID, or None on a host without visible GPUs, and its lock."""

    gpu: str | None
    lock: Path


class Job:
    """A process with tests on this host, and its reaper.

    Attributes:
        sanitized: whether it runs under compute-sanitizer.
        overdue: whether it was ended because it took too long.
        limit_s: limit on the current step in seconds, without waits for its device.
        status: its exit status, negative for a signal. None while it runs, and if it could not be ended.
        sources: descriptors that become readable when it has sent a message or printed.
        why, unrun: always empty, because the status says how a local process ended.
    """

    why = unrun = ""

    def __init__(
        self,
        group: Group,
        order: dict[str, Any],
        slot: TestSlot,
        *,
        folder: Path,
        cwd: Path,
        timeout_s: float,
        under: Sequence[str] = (),
    ) -> None:
        """Start the process.

        Args:
            order: the fields of :class:`Order` that all processes of the run share.
            folder: the folder for its files and caches. At its end only pytest's temporary directories remain.
            timeout_s: limit on one test in seconds, infinite for no limit.
            under: command that runs the program under compute-sanitizer, with ``%s`` for the name of the log.
        """
        self.overdue = False
        self.status: int | None = None
        self._ended = False
        self._timeout_s = timeout_s
        self._left_s: float | None = None
        self._allow(max(timeout_s, _AROUND_S))
        self._signalled_at = math.inf
        self._tail = bytearray()
        self._scratch = folder / "scratch"
        self._scratch.mkdir(parents=True)
        self.sanitized = bool(under)
        self._found = self._scratch / "sanitizer"
        file = self._scratch / "order.json"
        Order(**order, **named(group), basetemp=str(folder / "pytest"), locks=[str(slot.lock)]).write(file)
        self._start(file, [word.replace("%s", str(self._found)) for word in under], slot.gpu, cwd)

    def _start(self, order: Path, under: list[str], gpu: str | None, cwd: Path) -> None:
        heard, says = socket.socketpair()
        self._printed, prints = os.pipe2(os.O_CLOEXEC)
        self._lines = Lines(heard)
        self.sources = (self._lines.fileno(), self._printed)
        said = str(says.fileno())
        child = [*under, *program.PYTHON, "workers.testing.child", str(order), said]
        try:
            self._reaper = subprocess.Popen(
                [*program.PYTHON, "workers.testing.reaper", str(os.getpid()), said, *child],
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
        """Yield the process's new messages without waiting. End it if it takes too long."""
        for line in self._lines.read():
            with contextlib.suppress(ValueError):  # it died within this line
                if isinstance(message := json.loads(line or b"0"), dict) and isinstance(message.get("at"), str):
                    yield self._note(message)
        # The deadline is checked after all messages are read, because this process can be late itself.
        if time.monotonic() > self._deadline and not self.overdue and not self._ended:
            self.overdue = True
            self._signal(reaper.ABORT)

    def output(self) -> bytes:
        """Return what the process has printed since the last call, without waiting."""
        chunk = b""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._printed, _READ_BYTES):
                chunk += part
        self._tail += chunk
        del self._tail[:-_KEPT_BYTES]
        return chunk

    @property
    def findings(self) -> str:
        """The output of compute-sanitizer."""
        return sanitizer.findings(self._found)

    @property
    def last_words(self) -> str:
        """The end of the process's output, including the output of the running test that pytest captured."""
        parts = [content(captured, _KEPT_BYTES, at_end=True) for captured in self._lines.descriptors]
        parts.append(self._tail.decode(errors="replace"))
        return without_frames("\n".join(part.rstrip("\n") for part in parts))

    def watch(self) -> bool:
        """Return whether the process is gone with all that it started. A reaper that does not end is killed."""
        if time.monotonic() - self._signalled_at > _GONE_S:
            self._reaper.kill()
        return self._ended or self._reaper.poll() is not None

    def end(self) -> None:
        """End the process like Ctrl-C: fixtures are torn down, then it is killed with all that it started."""
        self._signal(reaper.END)

    def close(self) -> None:
        """Wait for the reaper's end and remove the job's files."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._reaper.wait(_GONE_S)
        if self._reaper.poll() is None:
            self._reaper.kill()
            self._reaper.wait()
        self._lines.close()
        os.close(self._printed)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _signal(self, number: signal.Signals) -> None:
        self._signalled_at = min(self._signalled_at, time.monotonic())
        self._reaper.send_signal(number)

    def _note(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["at"] == "start":
            self._allow(self._timeout_s)
        elif message["at"] == "finish":
            self._allow(max(self._timeout_s, _AROUND_S))
        elif message["at"] == "wait" and message.get("on"):
            self._left_s, self._deadline = self._deadline - time.monotonic(), math.inf
        elif message["at"] == "wait" and self._left_s is not None:
            self._left_s, self._deadline = None, time.monotonic() + self._left_s
        if message["at"] == "gone":
            self.status = message.get("status")
            self._ended = True
        return message

    def _allow(self, seconds: float) -> None:
        if not self.overdue:  # the report names the limit that it exceeded
            self.limit_s, self._deadline = seconds, time.monotonic() + seconds

    def _environment(self, gpu: str | None) -> dict[str, str]:
        """Return this process's environment without kqueue's settings, and with private caches and the job's GPU."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KQUEUE_")}
        own = private_directories(str(self._scratch))
        for name in own.keys() - _SHARED - environment.keys():
            environment[name] = own[name]
        environment["TMPDIR"] = own["TMPDIR"]
        Path(own["TMPDIR"]).mkdir()
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        return environment


class Here:
    """The runner of processes with tests on this host."""

    def __init__(self, config: pytest.Config) -> None:
        """Find the slots, and compute-sanitizer if it is requested."""
        option = config.option
        self._sanitizer = sanitizer.command() if option.kqueue_sanitize else []
        self._cwd = config.invocation_params.dir
        self._timeout_s = option.kqueue_timeout or math.inf
        self._count = 0
        self._used: dict[Job, TestSlot] = {}
        all_slots = _test_slots(option.kqueue_slots)
        self._free = deque(all_slots)
        gpus = len({slot.gpu for slot in all_slots if slot.gpu is not None})
        where = "no visible GPU" if not gpus else "1 GPU" if gpus == 1 else f"{gpus} GPUs"
        self.words = f"{len(all_slots)} at once, {where}"

    def open(self, order: dict[str, Any], folder: Path) -> None:
        """Prepare a run with the shared fields of :class:`Order` and a folder for files."""
        self._order, self._folder = order, folder

    def has_room(self) -> bool:
        """Return whether a slot is free."""
        return bool(self._free)

    def start(self, group: Group, *, sanitized: bool) -> Job:
        """Start a process for a group's tests, under compute-sanitizer or not."""
        self._count += 1
        slot = self._free.popleft()
        job = Job(
            group,
            self._order,
            slot,
            folder=self._folder / f"kqueue-{self._count}",
            cwd=self._cwd,
            timeout_s=self._timeout_s * (sanitizer.SLOWDOWN if sanitized else 1),
            under=self._sanitizer if sanitized else (),
        )
        self._used[job] = slot
        return job

    def over(self, job: Any) -> None:
        """Free the slot of a process that has ended."""
        self._free.append(self._used.pop(job))

    def close(self) -> None:
        """Do nothing: the controller closes all jobs."""


def _test_slots(slots: int | None) -> Sequence[TestSlot]:
    config = load()
    root = config.scratch.absolute()
    scratch.prepare(root)
    gpus = [gpu.uuid for gpu in choose(config.gpus, devices(), os.environ.get("CUDA_VISIBLE_DEVICES"))]
    count = slots or len(gpus) or max(1, len(os.sched_getaffinity(0)) // 2)
    on_devices = [TestSlot(uuid, scratch.device_lock(root, uuid)) for uuid in gpus] or [
        TestSlot(None, scratch.device_lock(root, "cpu"))
    ]
    return [on_devices[number % len(on_devices)] for number in range(count)]


def without_frames(text: str) -> str:
    """Return a process's last output without the frames of pytest and of this package."""
    lines = text.replace("\0", "\\x00").splitlines()
    return "\n".join(line for line in lines if not _FRAME.match(line)).strip()
