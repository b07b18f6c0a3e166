"""The supervisor's child process that sends traces of finished evaluations to an OpenTelemetry collector.

It is a separate process because the supervisor has one thread and must not wait for a collector. No evaluation waits
for it or depends on it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from typing import Any, Final

import structlog

from kqueue import logs, program
from kqueue.config import Config
from kqueue.folders import clean_environment
from workers.judge.host import linux
from workers.process import in_memory

_log: Any = structlog.get_logger(__name__)

#: Environment variables of which either enables the traces.
ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
#: Variable with the monotonic time from which the process exports finished evaluations.
SINCE_VARIABLE: Final = "KQUEUE_TRACES_SINCE"
_PROGRAM: Final = "workers.traces"
_PACKAGE: Final = "opentelemetry-exporter-otlp-proto-http"
#: Seconds before a process that ended is started again.
_AGAIN_S: Final = 10.0
#: Seconds for the last exports when the fleet ends. A process gets at least ``_FIRST_S`` seconds from its start.
_LAST_S: Final = 5.0
_FIRST_S: Final = 20.0


def is_wanted(environment: Mapping[str, str]) -> bool:
    """Return True if OpenTelemetry's own variables ask for traces."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if environment.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() == "none":
        return False
    return any(environment.get(name, "").strip() for name in ENDPOINTS)


class Exporter:
    """The owner of the process, if traces are enabled. :meth:`step` keeps it running, :meth:`stop` ends it."""

    def __init__(self, config: Config) -> None:
        """Read the environment without starting anything."""
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._start_at = 0.0
        self._started_at = 0.0
        self._since = time.monotonic()
        self._wanted = is_wanted(os.environ)
        if self._wanted:
            try:
                metadata.version(_PACKAGE)
            except metadata.PackageNotFoundError:
                _log.error("no traces: `pip install 'kqueue[telemetry]'`, or unset the endpoint", missing=_PACKAGE)
                self._wanted = False

    def step(self, now: float) -> None:
        """Start the process if it does not run and its restart is due."""
        if not self._wanted:
            return
        if self._process is not None and (code := self._process.poll()) is not None:
            _log.warning("the process that sends traces ended: it is started again", status=code)
            self._process, self._start_at, self._since = None, now + _AGAIN_S, now
        if self._process is None and now >= self._start_at:
            self._process = self._start()

    def pids(self) -> set[int]:
        """Return the process's id if it runs."""
        return set() if self._process is None else {self._process.pid}

    def stop(self) -> None:
        """End the process after a short wait in which it exports the last evaluations."""
        if self._process is None:
            return
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(_LAST_S, self._started_at + _FIRST_S - time.monotonic()))
        self._process.kill()
        self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        # The collector's credentials are among OpenTelemetry's variables.
        full = dict(os.environ) | self._config.environment() | {SINCE_VARIABLE: str(self._since)}
        settings = in_memory(full)
        die_with_this = linux.die_with(os.getpid())

        def prepare() -> None:
            die_with_this()
            # The process waits for the signal once it runs. A signal that comes before that must not end it.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

        self._started_at = time.monotonic()
        try:
            return subprocess.Popen(
                [*program.PYTHON, _PROGRAM],
                cwd="/",
                env=clean_environment(full) | logs.environment(self._config),
                stdin=settings,
                start_new_session=True,
                preexec_fn=prepare,
            )
        finally:
            os.close(settings)
