"""The supervisor's GPU monitor: it records health and memory bookings, tests suspect GPUs, and pauses unhealthy ones.

A GPU's state is a row of the table ``gpus`` (:mod:`kqueue.store.gpus`). Judges, operators and this module change it.
A judge, an operator or this module can request a test of a suspect GPU, which takes no evaluations until it passes. A
test runs :mod:`workers.judge.gpu.self_test` in a fresh process. Two failures in a row quarantine the GPU until it
passes a later test. This module never resets a GPU.

Only helper processes call the driver, and the supervisor never waits for one. A helper that hangs in the kernel, where
SIGKILL has no effect, is left behind, and its GPU is not tested again while it exists.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Final

import structlog
from sqlalchemy import Engine

from kqueue import program
from kqueue.config import Config
from kqueue.folders import clean_environment
from kqueue.store import gpus
from kqueue.store.gpus import GpuStatus
from workers.judge.gpu import booking, facts
from workers.judge.gpu.booking import Entry
from workers.judge.gpu.devices import Device
from workers.judge.host import linux
from workers.judge.sandbox import cgroups
from workers.pool import kill_group

_log: Any = structlog.get_logger(__name__)

#: Seconds between reads of the states.
_LOOK_S: Final = 1.0
#: Deadline of a test in seconds. On a busy host, importing torch takes most of it.
_TEST_S: Final = 90.0
#: Seconds after which a killed helper that has not died counts as hanging.
_DYING_S: Final = 5.0
#: Seconds before an inconclusive test is repeated.
_AGAIN_S: Final = 5.0
#: Seconds without output of the health watcher after which the driver counts as hanging.
_SILENT_S: Final = 60.0
#: Exit status of an inconclusive GPU self-test.
_UNKNOWN: Final = 3
_KEPT_XIDS: Final = 16
_LINE_BYTES: Final = 1 << 20
#: Multiple of the configured share that must be free before intake resumes.
_HYSTERESIS: Final = 1.5
_GIB: Final = 1 << 30


class _Helper:
    """A process that calls the driver. It dies with the supervisor and holds none of its secrets."""

    def __init__(self, module: str, arguments: Sequence[str], *, visible: str, output: IO[bytes] | int) -> None:
        environment = clean_environment(os.environ) | {"CUDA_VISIBLE_DEVICES": visible}
        self.started_at = time.monotonic()
        self.killed_at: float | None = None
        self.process = subprocess.Popen(
            [*program.PYTHON, module, *arguments],
            cwd="/",
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output != subprocess.PIPE else None,
            start_new_session=True,
            preexec_fn=linux.die_with(os.getpid()),
        )

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def hangs(self) -> bool:
        """True if it was killed and has not died within ``_DYING_S`` seconds."""
        return self.killed_at is not None and not self.ended and time.monotonic() - self.killed_at > _DYING_S

    def kill(self) -> None:
        if self.killed_at is None and not self.ended:
            self.killed_at = time.monotonic()
            kill_group(self.process.pid)


@dataclass(slots=True)
class _Test:
    """A running GPU self-test."""

    helper: _Helper
    output: IO[bytes]

    def last_line(self) -> str:
        self.output.seek(0)
        lines = self.output.read()[-8192:].decode("utf-8", "replace").splitlines()
        return lines[-1] if lines else "it printed nothing"


class Monitor:
    """The GPUs of one supervisor, which calls :meth:`step` about once a second."""

    def __init__(
        self,
        engine: Engine,
        host: str,
        devices: Sequence[Device],
        locks: Mapping[str, Path],
        ledgers: Mapping[str, Path],
        *,
        self_test: str = "workers.judge.gpu.self_test",
    ) -> None:
        """Configure a monitor without starting anything.

        Args:
            engine, host, devices: the database, this host's name, and its GPUs.
            locks: the lock file for exclusive use of each GPU, by UUID.
            ledgers: the folder in which each GPU's memory is booked, by UUID.
            self_test: the module that a test runs.
        """
        self._engine = engine
        self._host = host
        self._devices = {device.uuid: device for device in devices}
        self._locks = locks
        self._ledgers = ledgers
        #: The bookings as last written.
        self._booked: dict[str, list[Entry]] = {}
        self._self_test = self_test
        self._registered = False
        self._states: dict[str, GpuStatus] = {}
        self._look_at = 0.0
        self._watcher: _Helper | None = None
        self._watch_at = 0.0
        self._heard_at = 0.0
        self._heard = b""
        self._facts: dict[str, dict[str, Any]] = {}
        self._xids: dict[str, list[dict[str, Any]]] = {}
        #: Lowest amount of unaccounted memory by GPU in bytes, which belongs to the driver.
        self._least: dict[str, int] = {}
        #: True while facts have not been written to the database.
        self._unwritten = False
        self._suspicions: dict[str, str] = {}
        self._tests: dict[str, _Test] = {}
        self._left_behind: list[tuple[str, _Helper]] = []

    def step(self, in_database: Callable[[Callable[[], object]], bool]) -> None:
        """Do the work that is due.

        Args:
            in_database: runs a function that uses Postgres, and returns False if Postgres is away.
        """
        if not self._devices:
            return
        self._left_behind = [(uuid, helper) for uuid, helper in self._left_behind if not helper.ended]
        if not self._registered:
            self._registered = in_database(self._register)
            return
        self._watch()
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            if not in_database(self._exchange):
                return
        for uuid in list(self._tests):
            self._follow(uuid, in_database)
        for uuid, state in self._states.items():
            if state.due and uuid not in self._tests:
                self._begin(uuid, in_database)

    def pauses(self, uuid: str) -> str | None:
        """Return the reason why a GPU's workers must take no evaluations, or None. CPU slots never pause here."""
        if uuid not in self._devices:
            return None
        return self._states[uuid].paused if uuid in self._states else "the state of its GPU is not known yet"

    def resets(self) -> set[str]:
        """Return the GPUs that an operator wants to reset. The caller ends their workers, and tests wait for that."""
        return {uuid for uuid, state in self._states.items() if state.reset_due}

    def ended(self, uuid: str, in_database: Callable[[Callable[[], object]], bool]) -> None:
        """Note that all workers of a GPU from :meth:`resets` have ended, so that it is tested next."""

        def record() -> None:
            gpus.test_after_reset(self._engine, uuid)
            self._look()

        in_database(record)

    def pids(self) -> set[int]:
        """Return this monitor's processes, including those left behind."""
        helpers = [test.helper for test in self._tests.values()] + [helper for _, helper in self._left_behind]
        if self._watcher is not None:
            helpers.append(self._watcher)
        return {helper.process.pid for helper in helpers}

    def stop(self) -> None:
        """Kill all helpers without waiting for them."""
        for helper in [test.helper for test in self._tests.values()] + ([self._watcher] if self._watcher else []):
            helper.kill()

    # States ------------------------------------------------------------------------------------------

    def _register(self) -> None:
        for device in self._devices.values():
            gpus.register(self._engine, host=self._host, index=device.index, uuid=device.uuid, name=device.name)
        self._look()
        for uuid, state in self._states.items():
            self._xids[uuid] = state.facts.get("xids", [])

    def _look(self) -> None:
        self._states = {gpu.uuid: gpu for gpu in gpus.find(self._engine, uuids=list(self._devices))}

    def _exchange(self) -> None:
        """Write facts and suspicions to the database, and read the states."""
        for uuid, reason in list(self._suspicions.items()):
            gpus.ask_for_test(self._engine, uuid, reason=reason)
            del self._suspicions[uuid]
        if self._unwritten:
            hanging = {uuid for uuid, _ in self._left_behind}
            facts_by_gpu = {
                uuid: known | {"xids": self._xids[uuid]} | ({"test_hangs": True} if uuid in hanging else {})
                for uuid, known in self._facts.items()
            }
            gpus.see(self._engine, facts_by_gpu)
            self._unwritten = False
        for uuid in self._devices:
            self._write_bookings(uuid, booking.entries(self._ledgers[uuid]))
        self._look()

    def _write_bookings(self, uuid: str, entries: list[Entry]) -> None:
        """Write a GPU's booked memory and the processes that wait for memory, if that has changed."""
        if self._booked.get(uuid) == entries:
            return
        now = time.monotonic()
        gpus.see_memory(
            self._engine,
            uuid,
            booked_bytes=sum(entry.nbytes for entry in entries if not entry.waiting),
            capacity_bytes=max((entry.capacity for entry in entries), default=None),
            waiting=[(entry.label, entry.nbytes, now - entry.since) for entry in entries if entry.waiting],
        )
        self._booked[uuid] = entries

    # Facts -------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        now = time.monotonic()
        if self._watcher is None:
            if now >= self._watch_at and not any(uuid == "" for uuid, _ in self._left_behind):
                self._watcher = _Helper(facts.__name__, list(self._devices), visible="", output=subprocess.PIPE)
                assert self._watcher.process.stdout is not None
                os.set_blocking(self._watcher.process.stdout.fileno(), False)
                self._heard, self._heard_at = b"", now
            return
        self._hear(self._watcher)
        if self._watcher.ended:
            assert self._watcher.process.stdout is not None
            self._watcher.process.stdout.close()
            self._watcher, self._watch_at = None, now + _SILENT_S
        elif self._watcher.hangs:
            _log.error("the GPU health watcher does not die", pid=self._watcher.process.pid)
            self._left_behind.append(("", self._watcher))
            self._watcher = None
        elif now - self._heard_at > _SILENT_S and self._watcher.killed_at is None:
            _log.error("the driver does not answer")
            self._watcher.kill()
            self._suspicions |= dict.fromkeys(self._devices, "the driver did not answer for a minute")

    def _hear(self, watcher: _Helper) -> None:
        assert watcher.process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            while data := os.read(watcher.process.stdout.fileno(), 65536):
                self._heard += data
        *lines, self._heard = self._heard[-_LINE_BYTES:].split(b"\n")
        for line in lines:
            try:
                report = json.loads(line)
            except ValueError:
                continue
            self._heard_at = time.monotonic()
            for uuid, number in report["xids"]:
                of_application = number in facts.OF_APPLICATIONS
                (_log.info if of_application else _log.error)("the driver reports an error", gpu=uuid, xid=number)
                at = datetime.now(UTC).isoformat(timespec="seconds")
                self._xids[uuid] = [*self._xids.get(uuid, []), {"xid": number, "at": at}][-_KEPT_XIDS:]
                if not of_application:
                    self._suspicions[uuid] = f"the driver reported Xid {number}"
            for uuid, known in report["gpus"].items():
                if reason := facts.breakage(self._facts.get(uuid, known if "error" not in known else {}), known):
                    self._suspicions[uuid] = reason
                self._facts[uuid] = known
                if (unaccounted := known.get("unaccounted_bytes")) is not None:
                    self._least[uuid] = min(unaccounted, self._least.get(uuid, unaccounted))
            self._unwritten = True

    # Tests -------------------------------------------------------------------------------------------

    def _begin(self, uuid: str, in_database: Callable[[Callable[[], object]], bool]) -> None:
        if any(uuid == hanging for hanging, _ in self._left_behind):
            reason = "a test of this GPU hangs in the driver and cannot be killed"
            if in_database(lambda: gpus.record_failure(self._engine, uuid, reason=reason)):
                in_database(self._look)
            return
        output = os.fdopen(os.memfd_create("kqueue-self-test", os.MFD_CLOEXEC), "w+b")
        arguments = [uuid, str(self._locks[uuid])] + ([str(self._least[uuid])] if uuid in self._least else [])
        self._tests[uuid] = _Test(_Helper(self._self_test, arguments, visible=uuid, output=output), output)
        _log.info("a GPU is tested", gpu=uuid, reason=self._states[uuid].reason)

    def _follow(self, uuid: str, in_database: Callable[[Callable[[], object]], bool]) -> None:
        test = self._tests[uuid]
        helper = test.helper
        if not helper.ended and not helper.hangs:
            if time.monotonic() - helper.started_at > _TEST_S:
                helper.kill()
            return
        status, answer = helper.process.returncode, test.last_line()
        if helper.hangs:
            reason = "the test hangs in the driver and cannot be killed"
        elif helper.killed_at is not None:
            reason = f"the test did not end within {_TEST_S:.0f} s"
        else:
            reason = answer

        def record() -> None:
            if status == 0:
                gpus.record_pass(self._engine, uuid)
            elif status == _UNKNOWN:
                gpus.postpone(self._engine, uuid, reason=reason, seconds=_AGAIN_S)
            else:
                gpus.record_failure(self._engine, uuid, reason=reason)
            self._look()

        if not in_database(record):
            return  # recorded when Postgres is back
        if helper.hangs:
            self._left_behind.append((uuid, helper))
        test.output.close()
        del self._tests[uuid]
        gpu = self._states.get(uuid)
        passed = status == 0
        (_log.info if passed else _log.error)(
            "a GPU's test ended", gpu=uuid, passed=passed, said=reason, state=gpu.state if gpu else None
        )


class Pressure:
    """The host's memory and disk space. :attr:`reason` names the shortage, or is None.

    Below a configured share of free memory or disk space, workers take no evaluations, and running ones continue.
    Intake resumes at 1.5 times that share, so that a host at the limit does not flap.
    """

    def __init__(self, config: Config) -> None:
        self.reason: str | None = None
        self._memory = config.min_free_memory
        self._disk = config.min_free_disk
        self._folders = (config.scratch.absolute(), config.home_path)

    def look(self) -> None:
        """Check the host, and log a change."""
        factor = 1.0 if self.reason is None else _HYSTERESIS
        short = _short_memory(self._memory * factor) or _short_disk(self._folders, self._disk * factor)
        if short and self.reason is None:
            _log.error("no evaluations are taken", reason=short)
            self.reason = short
        elif self.reason is not None and not short:
            _log.info("evaluations are taken again", was=self.reason)
            self.reason = None


def _short_memory(least: float) -> str | None:
    for whose, (free, total) in {"the host's": _host_memory(), "the fleet's group's": cgroups.memory()}.items():
        if total and free < least * total:
            return f"less than {least:.1%} of {whose} {total / _GIB:.1f} GiB of memory is free"
    return None


def _short_disk(folders: tuple[Path, ...], least: float) -> str | None:
    for folder in folders:
        there = next(part for part in (folder, *folder.parents) if os.access(part, os.F_OK))
        try:
            disk = os.statvfs(there)
        except OSError:
            continue
        if disk.f_bavail < least * disk.f_blocks:
            size = disk.f_blocks * disk.f_frsize / _GIB
            return f"less than {least:.1%} of the {size:.1f} GiB of the disk of {folder} is free"
        # File systems without a fixed number of inodes report 0.
        if disk.f_favail < least * disk.f_files:
            return f"less than {least:.1%} of the {disk.f_files} inodes of the disk of {folder} are free"
    return None


def _host_memory() -> tuple[int, int]:
    """Return the bytes of memory available without swapping, and the total."""
    memory = dict.fromkeys(("MemAvailable", "MemTotal"), 0)
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in memory:
            memory[name] = int(rest.split()[0]) << 10
    return memory["MemAvailable"], memory["MemTotal"]
