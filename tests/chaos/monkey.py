"""Kills, stops and empties parts of a fleet at random, and logs each act.

The same seed gives the same acts in the same order with the same pauses. The process that an act finds and the duration
of a service's recovery depend on the machine.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import psycopg
import redis

from tests.chaos.family import Family, words
from tests.waiting import below, until

#: Number of times that each act comes in a round.
ROUND: Final = {
    "judge killed": 6,
    "task process killed": 4,
    "judge-supervisor killed": 1,
    "worker killed": 2,
    "worker told to end": 1,
    "worker told to quit": 1,
    "fork server killed": 1,
    "supervisor killed": 1,
    "Redis flushed": 2,
    "Redis killed": 1,
    "Redis stopped for a while": 1,
    "Postgres killed": 1,
    "Postgres backend killed": 1,
    "Postgres stopped for a while": 1,
}
#: Limit in seconds for a service's recovery. `kqueue up` pauses longer before each restart, up to 30 s.
_BACK_S: Final = 90.0
#: Limit in seconds for a worker's exit. A worker that gets SIGTERM finishes its evaluation first.
_ENDED_S: Final = 60.0
#: Seconds after an act in which new evaluations still meet its effects, such as a broken connection.
_AFTERMATH_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Event:
    """One act, a key of :data:`ROUND`, and the process that it struck. Times are in seconds since 1970."""

    action: str
    at: float
    until: float  #: time at which the target had recovered, or was gone for good
    worker: int | None  #: pid of the only worker whose evaluations it can have failed, or None for all workers
    pid: int
    note: str = ""  #: description of an unexpected result

    @property
    def harmless(self) -> bool:
        """Return whether the act can cost no attempt, because Redis only carries messages."""
        return self.action.startswith("Redis")


class Monkey(threading.Thread):
    """Acts on a fleet until it is stopped. ``events`` is its log."""

    def __init__(self, family: Family, database_url: str, redis_url: str, *, seed: int, every_s: float) -> None:
        """Take the fleet, URLs for libpq and redis-py, and the mean pause between two acts."""
        super().__init__(name="monkey", daemon=True)
        self.events: list[Event] = []
        self._family = family
        self._database_url = database_url
        self._redis_url = redis_url
        self._random = random.Random(seed)
        self._every_s = every_s
        self._told = threading.Event()

    def run(self) -> None:
        """Run acts until :meth:`stop`."""
        while True:
            acts = [action for action, times in ROUND.items() for _ in range(times)]
            self._random.shuffle(acts)
            for action in acts:
                if self._told.wait(self._random.expovariate(1 / self._every_s)):
                    return
                choice = self._random.random()
                try:
                    event = self._act(action, choice)
                except Exception as error:  # noqa: BLE001
                    # A dead thread would look like a quiet fleet.
                    event = Event(action, time.time(), time.time(), None, 0, f"could not be done: {error!r}")
                if event is not None:
                    self.events.append(event)

    def stop(self) -> None:
        """Finish the current act, so that everything has recovered, and stop."""
        self._told.set()
        self.join()

    def _act(self, action: str, choice: float) -> Event | None:
        """Return None if there was nothing to strike, such as no worker at present."""
        subject, _, verb = action.partition(" ")
        if subject == "Redis":
            return self._service(action, verb, self._family.valkey(), self._redis_answers, choice)
        if subject == "Postgres":
            return self._service(action, verb, self._family.postgres(), self._postgres_answers, choice)
        if subject == "supervisor":
            return self._supervisor(action)
        workers = self._family.workers()
        if not workers:
            return None
        worker = workers[int(choice * len(workers))]
        if subject in ("judge", "task"):
            found = self._family.judges(worker) if subject == "judge" else self._family.task_processes(worker)
            return self._kill(action, found[0], worker) if found else None
        if subject in ("fork", "judge-supervisor"):
            served = self._family.forkserver(worker) if subject == "fork" else self._family.judge_supervisor(worker)
            return self._kill(action, served, worker, waits_for=worker) if served else None
        number = {"killed": signal.SIGKILL, "told to end": signal.SIGTERM, "told to quit": signal.SIGQUIT}[verb]
        return self._kill(action, worker, worker, number, waits_for=worker)

    def _kill(
        self, action: str, pid: int, worker: int, number: int = signal.SIGKILL, waits_for: int | None = None
    ) -> Event | None:
        at = time.time()
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return None
        note = ""
        if waits_for is not None and not _eventually(lambda: not words(waits_for), _ENDED_S):
            note = f"worker {waits_for} had not ended after {_ENDED_S:.0f} s"
        return Event(action, at, time.time() if waits_for else at, worker, pid, note)

    def _supervisor(self, action: str) -> Event | None:
        supervisor = self._family.supervisor()
        if supervisor is None:
            return None
        at, theirs = time.time(), list(below(supervisor))
        with suppress(ProcessLookupError):
            os.kill(supervisor, signal.SIGKILL)
        gone = _eventually(lambda: not any(words(pid) for pid in theirs), _ENDED_S)
        return Event(action, at, time.time(), None, supervisor, "" if gone else "its processes lived on")

    def _service(
        self, action: str, verb: str, pid: int | None, answers: Callable[[], bool], choice: float
    ) -> Event | None:
        if pid is None:
            return None
        at = time.time()
        with suppress(ProcessLookupError, redis.RedisError):
            if verb == "flushed":
                with redis.Redis.from_url(self._redis_url, socket_timeout=5) as client:
                    client.flushall()
                return Event(action, at, time.time() + _AFTERMATH_S, None, pid)
            if verb == "killed":
                os.kill(pid, signal.SIGKILL)
            elif verb == "backend killed":
                # All backends exit and Postgres recovers, because one backend could have corrupted shared memory.
                os.kill(
                    next(child for child in below(pid) if "postgres: postgres" in " ".join(words(child))),
                    signal.SIGKILL,
                )
            else:
                everyone = [pid, *below(pid)]
                for one in everyone:
                    os.kill(one, signal.SIGSTOP)
                time.sleep(1 + 5 * choice)
                for one in everyone:
                    with suppress(ProcessLookupError):
                        os.kill(one, signal.SIGCONT)
        note = "" if _eventually(answers, _BACK_S) else f"not back after {_BACK_S:.0f} s"
        return Event(action, at, time.time() + _AFTERMATH_S, None, pid, note)

    def _postgres_answers(self) -> bool:
        try:
            with psycopg.connect(self._database_url, connect_timeout=2) as connection:
                return connection.execute("SELECT 1").fetchone() is not None
        except psycopg.Error:
            return False

    def _redis_answers(self) -> bool:
        try:
            with redis.Redis.from_url(self._redis_url, socket_timeout=2, socket_connect_timeout=2) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False


def _eventually(look: Callable[[], bool], timeout_s: float) -> bool:
    try:
        return until(look, timeout_s)
    except AssertionError:
        return False
