"""A real fleet with real services and scripted judges (judges.py)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import UUID, uuid4

import redis
from sqlalchemy import text

from kqueue import broker
from kqueue.config import Config, load
from kqueue.contract import Request, Settings, Verdict
from kqueue.local.process import running as alive
from kqueue.local.servers import Postgres, Valkey
from kqueue.store import engine as store_engine
from kqueue.store import evaluations
from kqueue.store import workers as registry
from tests.store.steps import change
from tests.waiting import until
from workers.judge.host import linux

HERE = Path(__file__).parent


@dataclass
class Services:
    """Postgres and Valkey, and a client's view of them."""

    postgres: Postgres
    valkey: Valkey
    directory: Path

    def __post_init__(self) -> None:
        # Kept, because a stopped server has no URL. Each start uses the same one.
        self._addresses = {"database_url": self.postgres.url, "redis_url": self.valkey.url}
        self.engine = store_engine.connect(self.postgres.url, application="tests", pool_size=5)
        self.app = broker.make_app(self.config())

    until = staticmethod(until)
    alive = staticmethod(alive)

    def config(self, **settings: Any) -> Config:
        places = {"home": self.directory / "home", "scratch": self.directory / "scratch"}
        return load(**self._addresses | places | {"gpus": "none", "reuse": False, "probe_share": 0} | settings)

    def submit(
        self,
        kernel: str,
        *,
        time_limit: float | None = None,
        send: bool = True,
        attempts: int = 1,
        lane: str = "cpu",
        **more: Any,
    ) -> UUID:
        """Submit an evaluation whose judge obeys `kernel`, with one attempt by default.

        Its hard limit in seconds is in the problem's label, because a sweeper can send the message again.
        """
        fields = {"problem": "p", "settings": Settings(max_attempts=attempts)} | more
        if time_limit is not None:
            fields["problem_label"] = f"limit={time_limit}"
        request = Request(kernel=kernel, backend="torch", lane=lane, **fields)
        # Fleets leave sending the message to its producer.
        [submitted] = evaluations.submit(self.engine, [request], slots={lane: 1000})
        if send:
            self.send(submitted.evaluation_id, label=submitted.message.label, lane=lane)
        return submitted.evaluation_id

    def send(self, evaluation_id: UUID, *, label: str = "", lane: str = "cpu") -> None:
        self.app.send_task(
            broker.EVALUATE,
            args=[str(evaluation_id)],
            task_id=str(evaluation_id),
            queue=broker.queue(lane),
            argsrepr=f"('{evaluation_id}',)",
            kwargsrepr=label,
        )

    def redis(self) -> redis.Redis:
        return redis.Redis.from_url(self._addresses["redis_url"].replace("redis+socket://", "unix://"))

    def settled(self) -> None:
        with self.redis() as client:
            until(lambda: not client.exists("kqueue.cpu"), what="an empty queue")

    def age(self) -> None:
        """Make queued evaluations a minute older, so that sweepers send their messages."""
        change(
            self.engine,
            "UPDATE evaluations SET submitted_at = submitted_at - interval '1 min', "
            "expires_at = expires_at - interval '1 min', published_at = NULL WHERE state = 'queued'",
        )

    def verdict(self, evaluation_id: UUID, timeout_s: float = 90.0) -> Verdict:
        return until(lambda: evaluations.verdict(self.engine, evaluation_id), timeout_s, "the verdict")

    def rows(self, sql: str, **values: Any) -> list[Any]:
        with self.engine.connect() as connection:
            return list(connection.execute(text(sql), values))

    def attempts(self, evaluation_id: UUID) -> list[Any]:
        return self.rows("SELECT * FROM attempts WHERE evaluation_id = :id ORDER BY number", id=evaluation_id)

    def started(self, evaluation_id: UUID) -> Any:
        return until(lambda: [a for a in self.attempts(evaluation_id) if a.ended_at is None], what="the attempt")[0]


@dataclass
class Fleet:
    """A supervisor with its workers."""

    services: Services
    process: subprocess.Popen[bytes]
    log: Path
    environment: dict[str, str] = field(repr=False)

    def live(self) -> list[registry.LiveWorker]:
        mine = linux.children(self.process.pid)
        return [worker for worker in registry.live(self.services.engine, within_s=60) if worker.pid in mine]

    def stop(self, number: int = signal.SIGINT, timeout_s: float = 90.0) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout_s)


def renewing(start: Callable[[], Fleet]) -> Callable[[], Fleet]:
    """Return a function that returns one fleet, and starts a new one after a test has ended it."""
    lives: list[Fleet] = []

    def running() -> Fleet:
        if not lives or lives[-1].process.poll() is not None:
            lives.append(start())
        return lives[-1]

    return running


@contextmanager
def fleets(services: Services) -> Iterator[Callable[..., Fleet]]:
    """Provide a function that starts a supervisor and waits until its workers are ready. All end with the block.

    The judges are scripted (judges.py), or real with `true`. `prefix` is a command that runs a command, such as one
    that enters a namespace. `variables` are added to the environment.
    """
    started: list[Fleet] = []
    scratches: list[Path] = []

    def start(
        *,
        slots: int = 1,
        true: bool = False,
        prefix: Sequence[str] = (),
        variables: Mapping[str, str] = MappingProxyType({}),
        **settings: Any,
    ) -> Fleet:
        if true and "scratch" not in settings:
            settings["scratch"] = Path(tempfile.mkdtemp(prefix="kqueue-scratch-"))
            settings["scratch"].chmod(0o711)  # candidates cannot enter pytest's folders
            scratches.append(settings["scratch"])
        config = services.config(**{"cpu_slots": slots, "retry_delay_s": 0.1, "lease_s": 4} | settings)
        environment = os.environ | config.environment()
        program = ["-P", "-m", "workers.fleet"]
        if not true:
            program = [str(HERE / "run_fleet.py")]
            places = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment |= {"PYTHONPATH": os.pathsep.join(places), "JUDGES": str(services.directory)}
        environment |= variables
        log = services.directory / f"fleet-{uuid4().hex[:8]}.log"
        with log.open("wb") as out:
            process = subprocess.Popen([*prefix, sys.executable, *program], env=environment, stdout=out, stderr=out)
        fleet = Fleet(services, process, log, environment)
        started.append(fleet)
        try:
            until(lambda: len(fleet.live()) >= slots or process.poll() is not None, 150, "the fleet")
            assert process.poll() is None
        except AssertionError:
            fleet.stop()
            raise AssertionError(log.read_text()) from None
        return fleet

    try:
        yield start
    finally:
        for fleet in started:
            fleet.stop()
        for scratch in scratches:
            shutil.rmtree(scratch, ignore_errors=True)
